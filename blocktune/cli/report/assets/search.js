// How the search went, the runners-up, and the state of the GPU.
BT.FINALISTS = 12;
BT.replay = 0;

BT.replayChoice = () =>
  BT.selectOf("replay", "Replay", BT.data.replay.map((file, index) => [index, file.name]), BT.replay, (value) => {
    BT.replay = Number(value);
    BT.drawSearch();
  });

BT.drawSearch = () => {
  const problem = BT.table ? BT.nothing() : "";
  const replay = BT.data.replay[BT.replay];
  BT.hint("replay", replay, "How search strategies compare: `tune lab replay SWEEPS --out FILE` replays them on recorded sweeps.");
  BT.showView("search", BT.table || replay);
  BT.fill(
    "search-body",
    problem ? BT.message(problem) : BT.table ? BT.searchParts() : null,
    replay
      ? [BT.el("h3", {}, "Strategies, replayed on recorded sweeps"), BT.replayChoice(), BT.el("p", { class: "quiet" }, `${replay.name}: the mean over ${replay.sweeps} sweeps, the band of the chosen strategy holds it with 95 % confidence, diamonds are the means of this sweep. The legend chooses a strategy.`), BT.el("div", { class: "chart", id: "strategies" })]
      : null,
  );
  if (BT.table && !problem) BT.drawProgress();
  if (replay) BT.chart("strategies", "strategies", { strategies: BT.strategies(replay) });
};

BT.searchParts = () => [
  BT.el("p", { class: "verdict", id: "throttled" }, BT.throttledVerdict()),
  BT.el("h3", {}, "History of the search: the best so far"),
  BT.el("p", { class: "quiet" }, "A recorded sweep tries every config in the order in which they were made; a search stops long before."),
  BT.el("div", { class: "columns" }, ["trial", "seconds"].map((over) => BT.el("div", { class: "chart", id: `progress-${over}` }))),
  BT.el("div", { id: "importance-part" }, BT.importanceParts()),
  BT.el("h3", {}, "Finalists"),
  BT.el("p", { class: "quiet" }, BT.finalistWords(), " ", BT.el("span", { id: "finalist-shared" })),
  BT.el("div", { class: "chart wide", id: "finalists", tabindex: "0", role: "region", "aria-label": "Finalists" }),
  BT.el("div", { id: "winners" }, BT.winnerTable() ?? []),
  BT.el("h3", {}, "Clock, temperature and power"),
  BT.el("p", { class: "quiet" }, BT.stateSource()),
  BT.el("div", { class: "chart wide", id: "states", tabindex: "0", role: "region", "aria-label": "State of the GPU over time" }),
];

// Which parameters decide whether a config is fast, as Optuna judges them.
BT.importanceParts = () =>
  BT.table.importance.length
    ? [
        BT.el("h3", {}, "Parameters that matter"),
        BT.el("p", { class: "quiet" }, "How much each one decides whether a config is among the fastest tenth: Optuna's PED-ANOVA of all trials with a time."),
        BT.el("div", { class: "chart", id: "importance" }),
      ]
    : null;

BT.drawProgress = () => {
  const progress = BT.progress();
  for (const over of ["trial", "seconds"]) BT.chart(`progress-${over}`, `progress-${over}`, { progress }, { live: true });
  const { rows, tie } = BT.finalists();
  const { names, shared } = BT.unshared(rows.map((row) => row.config));
  rows.forEach((row, place) => { row.name = names[place] || row.config; });
  BT.fill("finalist-shared", shared ? `All of them: ${shared}.` : "");
  if (BT.table.importance.length) {
    if (!document.getElementById("importance")) BT.fill("importance-part", BT.importanceParts());
    BT.chart("importance", "importance", { importance: BT.table.importance }, { live: true });
  }
  BT.chart("finalists", "finalists", { finalists: rows, tie: [{ low: 1, high: 1 + tie }] }, { live: true });
  BT.chart("states", "states", { states: BT.states() }, { live: true });
};

// Whether the card was throttled, in one sentence.
BT.throttledVerdict = () => {
  const known = BT.table.columns.throttle_reasons.filter((bits) => bits !== null);
  if (!known.length) return "Whether the card was throttled was not recorded.";
  const counts = Object.entries(BT.data.throttled).map(([bit, words]) => [known.filter((bits) => bits & Number(bit)).length, words]).filter(([count]) => count);
  if (!counts.length) return `The card was not throttled in any of ${BT.count(known.length, "trial")}.`;
  const faults = known.filter((bits) => bits & 0xe8).length;
  const words = counts.map(([count, meaning]) => `${meaning} in ${BT.number(count)} of ${BT.count(known.length, "trial")}`).join("; ");
  const limit = BT.table.environment.power_limit_w;
  return `Throttled: ${words}. ${faults ? "Heat or a fault slowed it: do not trust these times." : "Neither heat nor a fault slowed it."}${limit ? ` The power limit is ${limit} W.` : ""}`;
};

BT.progress = () => {
  const columns = BT.table.columns;
  let seconds = 0;
  let best = null;
  const rows = [];
  columns.kernel.forEach((kernel, index) => {
    seconds += columns.bench_seconds[index] + columns.compile_seconds[index];
    const row = BT.trial(index);
    if (row.tflops === null) return;
    best = Math.max(best ?? 0, row.tflops);
    if (BT.isBrushed(index)) rows.push({ trial: index + 1, seconds, tflops: row.tflops, best, config: row.config });
  });
  return rows;
};

BT.noise = () => BT.data.noise.find((file) => file.label === BT.table.shape_label && file.device === BT.table.device) ?? null;

BT.finalistWords = () => {
  const noise = BT.noise();
  return noise && !BT.state.brush
    ? `${noise.name}: ${noise.finals.times_us.length} finals of ${noise.configs.length} configs in turns, each over the first config of its own round; points are medians, lines the least and most. The orange band holds what counts as equal.`
    : `The ${BT.FINALISTS} fastest ${BT.state.brush ? "brushed " : ""}configs of the sweep over the fastest; lines are the least and most of each config's rounds, which a race cut short for most. The orange band holds what counts as equal.`;
};

BT.finalists = () => {
  const noise = BT.noise();
  return noise && !BT.state.brush ? BT.pairedFinalists(noise) : BT.fastest();
};

BT.median = (values) => {
  const sorted = [...values].sort((one, two) => one - two);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
};

BT.pairedFinalists = (noise) => {
  const rows = noise.configs.map((config, place) => {
    const ratios = noise.finals.times_us.map((times) => times[place] / times[0]);
    return { config, ratio: BT.median(ratios), low: Math.min(...ratios), high: Math.max(...ratios), rounds: ratios.length, role: "finalist" };
  });
  return { rows, tie: noise.tie_band };
};

BT.fastest = () => {
  const order = BT.ranked(BT.table).filter(BT.isBrushed).slice(0, BT.FINALISTS);
  if (!order.length) return { rows: [], tie: BT.table.tie_band };
  const first = BT.trial(order[0]);
  const rows = order.map((index) => {
    const row = BT.trial(index);
    const role = row.relative === 1 ? "anchor" : "finalist";
    return { config: row.config, ratio: row.score / first.score, low: row.low_us / first.time_us, high: row.high_us / first.time_us, rounds: row.rounds, role };
  });
  return { rows, tie: BT.table.tie_band };
};

BT.winnerTable = () => {
  const rows = BT.data.winners
    .filter((winner) => winner.label === BT.table.shape_label && winner.device === BT.table.device)
    .map((winner) => [winner.config, winner.origin, winner.regime, BT.us(winner.time_us), winner.over_default === null ? "–" : `${BT.number(winner.over_default, 3)} (${BT.number(winner.low, 3)} to ${BT.number(winner.high, 3)})`, winner.created_at.slice(0, 10)]);
  return rows.length ? BT.tableOf(["winner", "origin", "regime", "time", "default over winner (5th to 95th percentile)", "on"], rows, "What is stored for this shape") : null;
};

BT.stateSource = () => {
  const noise = BT.noise();
  return noise ? `${noise.name}: samples over ${BT.number(Math.max(...noise.samples.at_seconds))} s of measuring, next to those of the sweep's trials.` : "One dot for each trial of the sweep. Rounds of a candidate are too short for a power reading.";
};

BT.states = () => {
  const columns = BT.table.columns;
  const quantities = { "SM clock, MHz": columns.sm_clock_mhz, "temperature, °C": columns.temperature_c, "power, W": columns.power_w };
  const rows = [];
  columns.at_seconds.forEach((seconds, index) => {
    if (!BT.isBrushed(index)) return;
    const bits = columns.throttle_reasons[index];
    for (const [quantity, values] of Object.entries(quantities)) {
      if (values[index] !== null) rows.push({ quantity, seconds, value: values[index], clocks: bits === null ? "not recorded" : BT.throttledWords(bits) });
    }
  });
  const noise = BT.noise();
  if (noise) noise.samples.at_seconds.forEach((seconds, index) => rows.push({ quantity: "power, W, while noise was measured", seconds, value: noise.samples.power_w[index], clocks: `regime ${noise.samples.regime[index]}` }));
  return rows;
};

BT.strategies = (replay) => {
  const place = (measurements) => replay.measurements.indexOf(measurements);
  return Object.entries(replay.strategies).flatMap(([strategy, row]) =>
    replay.measurements.map((measurements) => {
      const regret = row.regret[String(measurements)];
      const own = BT.table && row.shapes[BT.table.label];
      return { strategy, measurements, seconds: row.seconds[String(measurements)], mean: 100 * regret.mean, low: 100 * regret.low, high: 100 * regret.high, this: own ? 100 * own[place(measurements)] : null };
    }),
  );
};

BT.addView("search", BT.drawSearch, ["sweep", "brush"]);
