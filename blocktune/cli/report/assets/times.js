// Lanes by unit of the compared configs, and the roofline.
BT.drawTimes = () => {
  const problem = BT.table ? BT.nothing() : "";
  const counters = BT.counterParts();
  BT.showView("times", BT.table || counters);
  BT.fill("times-body", problem ? BT.message(problem) : BT.table ? BT.timeParts() : null, counters);
  if (BT.table && !problem) BT.drawTimeCharts();
  BT.drawCounters();
};

BT.pair = () => ["a", "b"].filter((letter) => BT.state[letter] !== null).map((letter) => [letter.toUpperCase(), BT.trial(BT.state[letter])]);

BT.timeParts = () => [
  BT.pair().map(([letter, row]) => BT.el("p", {}, BT.laneWords(letter, row))),
  BT.el("div", { class: "chart wide", id: "lanes", tabindex: "0", role: "region", "aria-label": "Lanes of time by unit" }),
  BT.el("h3", {}, "Roofline"),
  BT.roofWords(),
  BT.el("div", { class: "chart", id: "roofline" }),
];

BT.drawTimeCharts = () => {
  const pair = BT.pair();
  BT.chart("lanes", "lanes", { lanes: pair.flatMap(([letter, row]) => BT.lanesOf(letter, row)) });
  if (BT.table.ceilings) BT.chart("roofline", "roofline", BT.roofline(pair));
};

BT.laneWords = (letter, row) => {
  if (row.total_us === null) return `${letter}, ${row.config}: there is no prediction for this config.`;
  const most = Object.keys(BT.table.terms).sort((one, two) => row[two] - row[one])[0];
  const off = row.error === null ? "" : ` Measured ${BT.us(row.time_us)}, so the model is ${BT.percent(Math.abs(row.error))} ${row.error > 0 ? "above" : "below"} it${Math.abs(row.error) > 0.25 ? " and explains this config badly" : ""}.`;
  return `${letter}, ${row.config}: predicted ${BT.us(row.total_us)}, ${BT.bandOf(row)}; the longest unit is ${BT.table.terms[most]}, alone ${BT.us(row[most])}.${off}`;
};

BT.lanesOf = (letter, row) => {
  const narrow = document.getElementById("times-body").clientWidth < BT.NARROW;
  const config = narrow ? letter : `${letter}: ${row.config}`;
  const lanes = Object.entries(BT.table.terms).filter(([term]) => row[term]).map(([term, words], order) => ({ config, kind: "term", term: narrow ? BT.folded(words) : words, us: row[term], order }));
  const place = { config, term: lanes[0]?.term ?? "time", order: 0 }; // rules cross all lanes and add none
  if (row.total_us !== null) lanes.push({ ...place, kind: "predicted", us: row.total_us });
  if (row.time_us !== null) lanes.push({ ...place, kind: "measured", us: row.time_us }, { ...place, kind: "range", low: row.low_us, high: row.high_us });
  return lanes;
};

BT.roofWords = () => {
  const roof = BT.table.ceilings;
  if (!roof) return BT.message("A rate of this device is not known, so that there is no roofline.");
  const ridge = (roof.peak_tflops * 1e3) / roof.memory_gbs;
  return BT.el("p", { class: "quiet" }, `Peak ${BT.number(roof.peak_tflops)} TFLOP/s and ${BT.number(roof.memory_gbs)} GB/s by the catalogue, which meet at ${BT.number(ridge)} FLOP per byte; ${BT.number(roof.l2_gbs)} GB/s of L2 as the model takes it. Filled: measured; hollow: predicted. Bytes are the model's, but for those that Nsight Compute counted.`);
};

BT.roofline = (pair) => {
  const points = BT.points(pair);
  return { roofs: BT.roofs(4 * Math.max(250, ...points.map((point) => point.intensity))), points };
};

BT.roofs = (last) => {
  const { peak_tflops: peak, memory_gbs: memory, l2_gbs: l2 } = BT.table.ceilings;
  const line = (roof, rate) => [1, (peak * 1e3) / rate, last].map((intensity) => ({ roof, intensity, tflops: Math.min(peak, (intensity * rate) / 1e3) }));
  return [...line("device memory", memory), ...line("L2", l2)];
};

// The compared configs by both counts of their bytes, what was counted, and the kernels of the ladder.
BT.points = (pair) => {
  const points = [];
  const add = (name, group, flops, us, bytes, memory, kind, shown, detail = BT.table.shape_label) => {
    if (us && bytes) points.push({ name, group, tflops: flops / us / 1e6, intensity: flops / bytes, memory, kind, shown, detail });
  };
  const alike = (each) => each.direction === BT.table.shape.direction;
  for (const [letter, row] of pair) {
    for (const [us, kind] of [[row.time_us, "measured"], [row.total_us, "predicted"]]) {
      add(letter, letter, BT.table.flops, us, row.bytes_once, "device memory", kind, kind === "measured");
      add(letter, letter, BT.table.flops, us, row.bytes_uncached, "L2", kind, false);
    }
  }
  for (const file of BT.data.counters.filter((each) => each.device === BT.table.device && alike(each))) {
    const counted = (name) => file.rows.find((row) => row.name === name)?.counted ?? null;
    const bytes = counted("read from DRAM") + counted("written to DRAM");
    add(file.config.split(" ")[0], "counters", file.flops, counted("time"), bytes, "device memory, counted", "measured", true, `${file.config}, ${file.label}`);
  }
  for (const climb of BT.data.ladder.filter((file) => file.device === BT.table.device).flatMap((file) => file.rows).filter(alike)) {
    for (const step of climb.steps) {
      const kind = step.time_us === null ? "predicted" : "measured";
      add(BT.stepName(step), "ladder", climb.flops, step.time_us ?? step.predicted_us, step.bytes_once, "device memory", kind, true, climb.label);
    }
  }
  return BT.unlabelled(points);
};

// Names that would stand on one another are left out; the pointer shows them. The others stand where no point is.
BT.unlabelled = (points) => {
  const named = [];
  const near = (one, two) => Math.abs(Math.log(one.tflops / two.tflops)) < 0.22 && Math.abs(Math.log(one.intensity / two.intensity)) < 1;
  const follows = (one, two) => two.intensity > 1.01 * one.intensity && two.intensity < 4 * one.intensity && Math.abs(Math.log(one.tflops / two.tflops)) < 0.1;
  for (const point of points) {
    if (!point.shown) continue;
    if (named.some((other) => near(point, other))) point.shown = "";
    else named.push(point);
  }
  for (const point of named) point.shown = points.some((other) => follows(point, other)) ? "left" : "right";
  return points;
};

BT.addView("times", BT.drawTimes, ["sweep", "a", "b"]);
