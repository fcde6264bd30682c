// The winner of every shape that was tuned or predicted here, then those that come with the package.
BT.drawRuns = () => {
  const newest = (winners) => [...winners].sort((one, other) => other.created_at.localeCompare(one.created_at));
  const own = newest(BT.data.winners.filter((winner) => !winner.ships));
  const shipped = newest(BT.data.winners.filter((winner) => winner.ships));
  BT.fill(
    "runs-body",
    BT.el("p", { class: "quiet", id: "gpus" }, BT.gpuWords()),
    own.length
      ? [BT.el("p", { class: "verdict", id: "last-run" }, BT.runSentence(own[0])), BT.runTable(own, "Winners found here")]
      : BT.message("No winner of yours is stored yet: `tune run --seq 8192 --dim 64` finds one."),
    shipped.length
      ? BT.el("details", { id: "shipped-runs" }, BT.el("summary", {}, `${BT.count(shipped.length, "winner")} that ship with blocktune`), BT.runTable(shipped, "Winners that ship with blocktune"))
      : null,
  );
};

BT.gpuWords = () => (BT.data.gpus.length ? `GPU of this machine: ${BT.data.gpus.join(", ")}.` : "This machine has no GPU: what is predicted is for the device that is named.");

BT.runSentence = (winner) => `${winner.device}, ${winner.label}: ${winner.config} takes ${BT.runTime(winner)}; ${BT.runGain(winner)}.`;

BT.runTime = (winner) => (winner.time_us === null ? `${winner.predicted}, predicted` : BT.us(winner.time_us));

BT.runGain = (winner) => {
  if (winner.config === winner.default) return "it is the default";
  return winner.over_default === null ? "not timed next to the default" : `${BT.number(winner.over_default, 3)} times as fast as the default`;
};

BT.runTable = (winners, caption) =>
  BT.tableOf(
    ["GPU", "shape", "config", "time", "compared", "on"],
    winners.map((winner) => [winner.device, winner.label, winner.config, BT.runTime(winner), BT.runGain(winner), winner.created_at.slice(0, 10)]),
    caption,
  );

BT.addView("runs", BT.drawRuns, []);
