// Starts the page: data, colours, the choice of a sweep.
BT.start = async () => {
  BT.data = await BT.unpack("data");
  BT.theme(BT.wantedTheme());
  const { sweeps, devices } = BT.data;
  const names = sweeps.length ? sweeps.map((sweep) => sweep.device) : BT.data.winners.map((winner) => winner.device);
  const own = devices.find((device) => device.name === names[0]) ?? devices.find((device) => device.cc === "9.0") ?? devices[0];
  const other = devices.find((device) => device.cc === (own.cc === "8.0" ? "9.0" : "8.0")) ?? own;
  Object.assign(BT.state, { gpuA: own.id, gpuB: other.id });
  BT.fill("summary", BT.summary());
  BT.drawChoice(BT.firstSweep());
  await BT.chooseSweep(sweeps.length ? BT.firstSweep() : -1);
  BT.watchViews();
};

BT.drawChoice = (chosen) => {
  const { sweeps } = BT.data;
  BT.fill(
    "chosen",
    sweeps.length
      ? BT.selectOf("sweep", "Sweep", sweeps.map((sweep, index) => [index, `${sweep.label} (${sweep.device})`]), chosen, (value) => BT.chooseSweep(Number(value)))
      : null,
  );
};

// The sweep of the ladder's or the noise's shape if there is one, so that the views fit together; else the first.
BT.firstSweep = () => {
  const labels = [...BT.data.noise.map((file) => file.label), ...BT.data.ladder.flatMap((file) => file.rows.map((row) => row.label))];
  return Math.max(0, BT.data.sweeps.findIndex((sweep) => labels.includes(sweep.shape_label)));
};

BT.summary = () => {
  const { sweeps, winners, bench } = BT.data;
  const rows = bench.reduce((sum, file) => sum + file.rows.length, 0);
  return `${BT.count(sweeps.length, "sweep")}, ${BT.count(winners.length, "winner")}, ${BT.count(rows, "row")} of benches. Made on ${BT.data.created_at.slice(0, 16).replace("T", " ")} UTC.`;
};

BT.wantedTheme = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
BT.theme = (name) => {
  document.documentElement.dataset.theme = name;
  BT.redrawAll();
};
document.getElementById("theme").addEventListener("click", () => BT.theme(BT.isDark() ? "light" : "dark"));
// What is printed is dark on white. A chart takes a moment to be drawn again, so the page waits for that before.
matchMedia("print").addEventListener("change", (event) => event.matches && BT.theme("light"));

BT.onChange((names) => {
  const select = document.getElementById("sweep");
  if (select && names.includes("sweep")) select.value = String(BT.state.sweep);
  if (names.includes("sweep")) BT.explorer.source = null;
});

BT.started = BT.start().catch((error) => {
  document.querySelector("main").replaceChildren(BT.message(`This report cannot be shown: ${error.message}. It needs a browser of 2023 or later.`));
  throw error;
});
