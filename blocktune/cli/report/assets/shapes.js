// Many shapes at once, the ladder, block sizes, and what changed.
BT.FLEET = { peer: "over the fastest rival", default: "over the default", rung: "source of the config", misses: "misses" };
BT.fleet = { measure: "peer", bench: 0 };

BT.drawShapes = () => {
  BT.fill(
    "shapes-body",
    BT.fleetParts(),
    BT.titled("All contenders of a bench", BT.benchParts()),
    BT.titled("The ladder: how attention became fast", BT.ladderParts()),
    BT.titled("Runtime and bytes against the block size", BT.blockSizeParts()),
    BT.titled("What changed against another store", BT.differenceParts()),
    BT.titled("Autotuned kernels", BT.kernelParts()),
  );
  BT.drawFleet();
  BT.climbs().forEach((climb, number) => BT.chart(`ladder-${number}`, "ladder", { ladder: BT.ladderRows(climb) }));
  if (BT.table && !BT.nothing()) BT.chart("block-sizes", "block-sizes", { blocks: BT.blockSizes() }, { live: true });
  if (BT.data.differences?.length) BT.chart("differences", "differences", { differences: BT.data.differences });
};

// A part under its heading; none where it has nothing to show.
BT.titled = (title, part) => (part === null ? null : [BT.el("h3", {}, title), part]);

BT.isPlain = (shape) => !shape.features && shape.seqlen_q === shape.seqlen_k && shape.head_dim === shape.head_dim_v && shape.num_heads === shape.num_heads_kv;
BT.MASKS = { none: "full", upper_left: "causal", lower_right: "causal, lower right" };
BT.kindOf = (shape) => `${shape.direction}, ${BT.MASKS[shape.causal] ?? shape.causal}, ${shape.dtype}`;

// One row for every plain shape: the newest bench of it, its winner, the source of its config and its misses.
BT.shapeRows = () => {
  const rows = new Map();
  const row = (shape, label) => {
    if (!BT.isPlain(shape)) return null;
    const key = `${label}`;
    if (!rows.has(key)) rows.set(key, { label, seq: shape.seqlen_q, dim: shape.head_dim, kind: BT.kindOf(shape), peer_text: "–", default_text: "–", rung_text: "–" });
    return rows.get(key);
  };
  for (const bench of [...BT.data.bench].reverse()) {
    for (const entry of bench.rows) {
      const own = row(entry.shape, entry.label);
      if (own && entry.over_peer !== null) Object.assign(own, { peer: entry.over_peer, peer_text: `${BT.number(entry.over_peer, 3)} over ${entry.peer} (${bench.name}, ${bench.regime})` });
      if (own && entry.over_default !== null) Object.assign(own, { default: entry.over_default, default_text: `${BT.number(entry.over_default, 3)} (${bench.name})` });
    }
  }
  for (const winner of BT.data.winners) {
    const own = row(winner.shape, winner.label);
    if (own && own.default === undefined && winner.over_default !== null) Object.assign(own, { default: winner.over_default, default_text: `${BT.number(winner.over_default, 3)} (${winner.origin})` });
    const rung = BT.data.rungs[winner.device]?.[winner.label];
    if (own && rung) Object.assign(own, { rung: rung.replaceAll("_", " "), rung_text: rung.replaceAll("_", " "), rung_letter: rung[0].toUpperCase() });
  }
  for (const miss of BT.data.misses) {
    const own = row(miss.shape, miss.label);
    if (own) own.misses = miss.calls;
  }
  return BT.onePerCell([...rows.values()]);
};

// Shapes of equal sequence and dimension differ in batch and heads: the cell shows the one with the most facts.
BT.onePerCell = (rows) => {
  const cells = new Map();
  const facts = (row) => Object.values(row).length;
  for (const row of rows) {
    const key = [row.kind, row.seq, row.dim].join();
    if (!cells.has(key) || facts(row) > facts(cells.get(key))) cells.set(key, row);
  }
  return [...cells.values()];
};

// What the shapes have in common to colour them by.
BT.measures = () => {
  const rows = BT.shapeRows();
  return Object.fromEntries(Object.entries(BT.FLEET).filter(([measure]) => rows.some((row) => row[measure] !== undefined)));
};

BT.fleetParts = () => {
  const measures = BT.measures();
  if (!Object.keys(measures).length) return null;
  if (!(BT.fleet.measure in measures)) [BT.fleet.measure] = Object.keys(measures);
  return [
    BT.choices("What the colour says", measures, BT.fleet.measure, (measure) => {
      BT.fleet.measure = measure;
      BT.drawShapes();
    }),
    BT.data.sweeps.length ? BT.el("p", { class: "quiet" }, "Click a shape to load its sweep, where there is one.") : null,
    BT.el("div", { class: "chart wide", id: "fleet", tabindex: "0", role: "region", "aria-label": "Shapes by sequence and head dimension" }),
  ];
};

BT.drawFleet = () => {
  const { measure } = BT.fleet;
  const rows = BT.shapeRows().filter((row) => row[measure] !== undefined);
  if (!rows.length) return;
  const far = Math.max(0.1, ...rows.map((row) => Math.abs((row[measure] ?? 1) - 1)));
  for (const row of rows) row.light = Math.abs(row[measure] - 1) < 0.6 * far;
  BT.chart("fleet", `shapes-${measure}`, { shapes: rows }, { ready: BT.followFleet, signals: BT.fleetEnds(rows, measure) });
};

// The middle of the scale, 1, is always inside.
BT.fleetEnds = (rows, measure) => {
  const values = rows.map((row) => row[measure]).filter((value) => typeof value === "number");
  return { low: Math.min(0.9, ...values), high: Math.max(1.1, ...values) };
};

BT.followFleet = (view) =>
  view.addEventListener("click", (event, item) => {
    const index = BT.data.sweeps.findIndex((sweep) => sweep.shape_label === item?.datum?.label);
    if (index >= 0) BT.chooseSweep(index).then(() => document.getElementById("sweeps").scrollIntoView());
  });

BT.benchParts = () => {
  BT.hint("bench", BT.data.bench.length, "Your shapes next to PyTorch, cuDNN and installed rivals: `tune bench --out FILE`.");
  if (!BT.data.bench.length) return null;
  const choose = (value) => {
    BT.fleet.bench = Number(value);
    BT.drawContenders();
  };
  queueMicrotask(BT.drawContenders);
  return [
    BT.selectOf("bench", "Bench", BT.data.bench.map((bench, index) => [index, `${bench.name} (${bench.created_at.slice(0, 10)}, ${bench.regime})`]), BT.fleet.bench, choose),
    BT.el("p", { class: "quiet", id: "bench-words" }),
    BT.el("div", { class: "chart", id: "contenders" }),
  ];
};

BT.drawContenders = () => {
  const bench = BT.data.bench[BT.fleet.bench];
  const { names, shared } = BT.unshared(bench.rows.map((row) => row.label));
  const contenders = bench.rows.flatMap((row, order) => row.contenders.map((each) => ({ ...each, label: row.label, row: names[order] || row.label, order })));
  const { power_limit_w: limit, ...versions } = bench.software;
  const software = Object.entries(versions).filter(([, value]) => value).map(([name, value]) => `${name} ${value}`);
  if (limit) software.push(`power limit ${limit} W`);
  const hot = bench.rows.filter((row) => row.after?.throttle_reasons).length;
  BT.fill("bench-words", `${bench.device}, ${software.join(", ")}. ${hot ? `Clocks were lowered at the end of ${BT.count(hot, "row")}.` : "Clocks were not lowered."}${shared ? ` All shapes: ${shared}.` : ""}`);
  BT.chart("contenders", "contenders", { contenders });
};

// The ladders of the files; and unless one of a backward was measured, the one whose steps a bench has measured.
BT.climbs = () => {
  const climbs = BT.data.ladder.flatMap((file) => file.rows.map((climb) => ({ ...climb, device: file.device })));
  const measured = climbs.some((climb) => climb.direction === "backward" && climb.origin === "measured");
  const own = (direction) => climbs.filter((climb) => climb.direction === direction);
  return [...own("forward"), ...(measured ? [] : BT.backwardClimbs()), ...own("backward")];
};
BT.stepName = (step) => step.name.replaceAll("_", " ");

BT.ladderParts = () => {
  const climbs = BT.climbs();
  BT.hint("ladder", climbs.length, "The steps from standard attention to the fastest kernel: `tune ladder --out FILE`.");
  if (!climbs.length) return null;
  const origin = (climb) => (climb.origin === "predicted" ? "Predicted by the models, nothing was measured: dashed." : `${climb.origin[0].toUpperCase()}${climb.origin.slice(1)}: solid; predicted: hollow.`);
  const lead = BT.el("p", { class: "quiet" }, "A bar leads from the time before to the step's own; the factor is how much faster the step is.");
  return [lead, ...climbs.map((climb, number) => [BT.el("h4", {}, `${climb.label} on ${climb.device}`), BT.el("p", { class: "quiet" }, origin(climb)), BT.el("div", { class: "chart", id: `ladder-${number}` }), BT.ladderTable(climb)])];
};

// Contenders of a bench that are steps of the backward, first to last.
BT.BACKWARD_STEPS = {
  standard: ["standard", "PyTorch's operations one by one, with all scores and their gradients in device memory"],
  flash_bwd_split: ["two passes", "scores are computed again on the chip, once for dQ and once for dK and dV"],
  flash_bwd_fused: ["one pass", "scores are computed again once, and dQ is added up in device memory"],
  tuned: ["tuned", "the fastest kernel and blocks known here"],
};
BT.HOPPER_STEP = ["hopper", "warps that copy while other warps compute, with the instructions of Hopper"];

// The backward of the ladder's shape if a bench has it, else the longest: one ladder.
BT.backwardClimbs = () => {
  const has = (row, name) => row.contenders.some((each) => each.name === name);
  const rows = BT.data.bench.flatMap((bench) => bench.rows.map((row) => ({ ...row, bench })));
  const able = rows.filter((row) => row.shape.direction === "backward" && ["flash_bwd_split", "flash_bwd_fused", "tuned"].every((name) => has(row, name)));
  const forward = BT.data.ladder.flatMap((file) => file.rows).map((climb) => climb.label.replace(/( backward)?$/, " backward"));
  const row = able.find((each) => forward.includes(each.label)) ?? able.at(-1);
  return row ? [BT.backwardClimb(row)] : [];
};

BT.backwardClimb = ({ label, contenders, bench }) => {
  const found = Object.entries(BT.BACKWARD_STEPS).flatMap(([name, usual]) => {
    const timed = contenders.find((each) => each.name === name);
    const [step, idea] = timed?.config.startsWith("flash_bwd_hopper") ? BT.HOPPER_STEP : usual;
    return timed ? [{ ...timed, name: step, idea }] : [];
  });
  const steps = found.map((each, place) => ({
    ...each, why: "", problem: "", predicted_us: null, over_before: place ? found[place - 1].time_us / each.time_us : null,
  }));
  return { label, device: bench.device, origin: `measured by ${bench.name}`, flops: found[0].tflops * found[0].time_us * 1e6, steps };
};

BT.ladderRows = (climb) => {
  let before = null;
  return climb.steps.map((step, order) => {
    const time = step.problem ? null : (step.time_us ?? step.predicted_us);
    const row = {
      step: BT.stepName(step), order, config: step.config, note: [step.idea, step.why, step.problem].filter(Boolean).join(". "),
      time_us: time, before_us: before ?? time, right_us: time === null ? null : Math.max(time, before ?? time), predicted_us: step.predicted_us, band: step.band,
      origin: step.time_us === null ? "predicted" : "measured", over_before: step.over_before,
      change: before !== null && time > before ? "slower" : "faster",
      gain: step.over_before === null ? "" : `×${BT.number(step.over_before, 2)}`,
    };
    before = time ?? before;
    return row;
  });
};

BT.ladderTable = (climb) => {
  const rate = (step) => (step.time_us ? BT.number(climb.flops / step.time_us / 1e6, 1) : "–");
  const columns = { step: BT.stepName, time: (step) => BT.us(step.time_us), predicted: (step) => (step.predicted_us === null ? "–" : `${BT.us(step.predicted_us)}, ${step.band}`), "TFLOP/s": rate, "what is new": (step) => step.problem || step.idea };
  const kept = Object.entries(columns).filter(([, cell]) => climb.steps.some((step) => cell(step) !== "–"));
  return BT.tableOf(kept.map(([name]) => name), climb.steps.map((step) => kept.map(([, cell]) => cell(step))), `The ladder of ${climb.label}`);
};

BT.blockSizeParts = () =>
  BT.table && !BT.nothing()
    ? [BT.el("p", { class: "quiet" }, `${BT.trial(BT.state.a).kernel}, ${BT.table.label}: the fastest config of each size. Time is measured; bytes (every key read from memory again) and the tail of the last wave are the model's.`), BT.el("div", { class: "chart wide", id: "block-sizes", tabindex: "0", role: "region", "aria-label": "Time and bytes over block sizes" })]
    : null;

BT.blockSizes = () => {
  const { kernel } = BT.trial(BT.state.a);
  const rows = [];
  for (const side of ["block_m", "block_n"]) {
    const seen = new Set();
    for (const index of BT.ranked(BT.table)) {
      const row = BT.trial(index);
      if (row.kernel !== kernel || seen.has(row[side])) continue;
      seen.add(row[side]);
      const add = (quantity, value, kind) => value !== null && rows.push({ side, size: row[side], quantity, value, kind, config: row.config });
      add("time, µs", row.time_us, "measured");
      add("GB of device memory", row.bytes_uncached === null ? null : row.bytes_uncached / 1e9, "predicted");
      add("tail, % of the time", row.tail_us === null ? null : (100 * row.tail_us) / row.total_us, "predicted");
    }
  }
  return rows;
};

BT.differenceParts = () => {
  const found = BT.data.differences;
  BT.hint("differences", found, "What an upgrade changed: `tune report --against STORE`.");
  if (found === null) return null;
  if (!found.length) return BT.message("No winner differs.");
  return [
    BT.el("div", { class: "chart", id: "differences" }),
    BT.tableOf(["shape", "change", "before", "after", "after / before"], found.map((each) => [each.label, each.change, each.before, each.after, BT.number(each.ratio, 3)])),
  ];
};

BT.kernelParts = () => {
  const found = BT.data.kernels;
  BT.hint("kernels", found.length, "Winners of your own Triton kernels: launch them under `blocktune.install()`, or `tune run MODULE:KERNEL`.");
  if (!found.length) return null;
  return BT.tableOf(
    ["kernel", "key", "GPU", "config", "µs", "over the first", "configs", "what decides"],
    found.map((each) => [each.kernel, each.key, each.device, each.config, BT.number(each.time_us, 1), each.over_default === null ? "–" : BT.number(each.over_default, 3), String(each.configs), each.importance || "–"]),
  );
};

BT.addView("shapes", BT.drawShapes, ["sweep"]);
