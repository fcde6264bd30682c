// Counters of Nsight Compute next to what the models predict of the same config.
BT.counted = null; // the index of the file that is shown; null for the one that fits the sweep

BT.counterFile = () => {
  const fitting = BT.data.counters.findIndex((each) => each.label === BT.table?.label);
  return BT.data.counters[BT.counted ?? Math.max(0, fitting)];
};

BT.counterParts = () => {
  const file = BT.counterFile();
  BT.hint("counters", file, "Counters of Nsight Compute next to the model: `tune profile FLAGS --out NAME.counters.csv` records them on a GPU.");
  if (!file) return null;
  const choose = (index) => {
    BT.counted = Number(index);
    BT.drawTimes();
    document.getElementById("counter-file").focus();
  };
  const names = BT.data.counters.map((each, index) => [index, `${each.config}, ${each.label}`]);
  return [
    BT.el("h3", {}, "The model next to the counters"),
    BT.selectOf("counter-file", "Counters of", names, BT.data.counters.indexOf(file), choose),
    BT.el("p", { class: "quiet", id: "counter-words" }, `${file.name}: one call on ${file.device}${file.recorded_on ? `, ${file.recorded_on}` : ""}, under Nsight Compute: ${file.launches.join(", ")}. Hollow: predicted; the grey line is what was counted.`),
    BT.el("div", { class: "chart", id: "counter-ratios" }),
    BT.tableOf(["", "predicted", "counted", "ratio", "remark"], file.rows.map((row) => [row.name, BT.countedText(row.predicted, row.unit), BT.countedText(row.counted, row.unit), BT.number(row.ratio, 2), row.remark])),
    file.stalls.length
      ? [BT.el("h4", {}, "What warps waited for"), BT.el("div", { class: "chart", id: "stall-reasons" })]
      : null,
  ];
};

BT.countedText = (value, unit) => {
  if (value === null) return "–";
  if (unit === "bytes") return `${BT.number(value / 1e6, 1)} MB`;
  return unit ? `${BT.number(value, 1)} ${unit === "us" ? "µs" : unit}` : BT.number(value);
};

BT.drawCounters = () => {
  const file = BT.counterFile();
  if (!file) return;
  const counters = file.rows
    .map((row, order) => ({ ...row, order, predicted: BT.countedText(row.predicted, row.unit), counted: BT.countedText(row.counted, row.unit) }))
    .filter((row) => row.ratio); // a logarithm shows no zero
  BT.chart("counter-ratios", "counter-ratios", { counters });
  BT.chart("stall-reasons", "stall-reasons", { stalls: file.stalls.map((stall, order) => ({ ...stall, reason: stall.reason.replaceAll("_", " "), order, percent: 100 * stall.share })) });
};
