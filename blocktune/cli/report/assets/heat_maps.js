// View 3: the tiles of the chosen sweep, a set of maps for every kernel.
BT.MEASURES = { tflops: "TFLOP/s", share: "% of the best", predicted: "predicted", error: "model's error" };
BT.LISTED = 12;

BT.measured = (row) => {
  const best = BT.table.columns.score[BT.ranked(BT.table)[0]];
  return {
    tflops: row.tflops,
    share: row.score === null ? null : (100 * best) / row.score,
    predicted: row.predicted_tflops,
    error: row.error === null ? null : 100 * row.error,
  }[BT.state.measure];
};

// The cells of one kernel: the fastest config of every tile, and the tiles without a time with the reason.
BT.cellsOf = (kernel) => {
  const cells = new Map();
  const columns = BT.table.columns;
  const key = (row) => [row.block_m, row.block_n, row.num_warps, row.num_stages].join();
  for (const index of columns.kernel.keys()) {
    if (columns.kernel[index] !== kernel) continue;
    const row = BT.trial(index);
    const found = cells.get(key(row));
    if (!found) cells.set(key(row), { ...row, variants: 1 });
    else if (row.score !== null && (found.score === null || row.score < found.score)) cells.set(key(row), { ...row, variants: found.variants + 1 });
    else found.variants += 1;
  }
  const empty = BT.table.empty_cells.filter((cell) => cell.kernel === kernel && !cells.has(key(cell)));
  return [...[...cells.values()].map(BT.cell), ...empty.map((cell) => ({ ...cell, config: `${cell.block_m}x${cell.block_n} w${cell.num_warps} s${cell.num_stages}`, state: "impossible", picked: "" }))];
};

BT.cell = (row) => {
  const value = BT.measured(row);
  const timed = row.score !== null && value !== null;
  return {
    index: row.index, block_m: row.block_m, block_n: row.block_n, num_warps: row.num_warps, num_stages: row.num_stages,
    state: timed ? "timed" : "failed",
    reason: row.error_text || row.outcome.replaceAll("_", " "),
    value,
    number: value === null ? "" : BT.cellNumber(value),
    spill_bytes: row.spill_bytes,
    config: row.config,
    time: `${BT.us(row.time_us)}, ${BT.number(row.tflops)} TFLOP/s`,
    rounds: row.rounds ? `${row.rounds}, ${BT.us(row.low_us)} to ${BT.us(row.high_us)}` : "–",
    predicted: BT.predicted(row),
    resources: `${BT.number(row.registers)} registers, ${BT.bytes(row.shared_bytes)} shared, ${BT.number(row.block_warps)} warps`,
    spilled: row.spill_bytes ? `${BT.bytes(row.spill_bytes)} per thread` : "nothing",
    blocks: BT.number(row.blocks_per_sm),
    variants: row.variants,
    picked: BT.pickedAs(row.index),
  };
};

BT.cellNumber = (value) => {
  if (BT.state.measure === "error") return BT.signed(BT.number(value), value);
  return BT.number(value, Math.abs(value) < 20 ? 1 : 0);
};

// The cells of every kernel that has a time, the kernel of the fastest config first, and the ends of their colours.
BT.mapsOf = () => {
  const kernels = [...new Set(BT.ranked(BT.table).map((index) => BT.table.columns.kernel[index]))];
  const maps = kernels.map((kernel) => [kernel, BT.cellsOf(kernel)]);
  const values = maps.flatMap(([, cells]) => cells.filter((cell) => cell.state === "timed").map((cell) => cell.value));
  return { maps, signals: BT.ends(values) };
};

BT.drawHeatMaps = () => {
  BT.hint("sweep", BT.table, BT.NO_SWEEP);
  BT.showView("sweeps", BT.table);
  if (!BT.table) return BT.fill("sweeps-body");
  if (BT.nothing()) return BT.fill("sweeps-body", BT.message(BT.nothing()));
  BT.maps = BT.mapsOf();
  const { maps, signals } = BT.maps;
  BT.fill(
    "sweeps-body",
    BT.el("p", { id: "sweep-words" }, BT.sweepWords()),
    BT.choices("What the colour says", BT.MEASURES, BT.state.measure, (measure) => BT.change({ measure })),
    BT.el("p", { class: "quiet" }, "Hatched: cannot exist or has no time, the pointer says why. Empty: not tried. Red triangle: registers are spilled. Each cell is the fastest of its variants."),
    BT.el("div", { class: "maps" }, maps.map(([kernel], number) =>
      BT.el("details", { open: number < 3, class: "kernel", ontoggle: () => BT.drawMaps(BT.maps.maps, BT.maps.signals) }, BT.el("summary", {}, kernel), BT.el("div", { class: "chart wide", id: `heat-${number}`, tabindex: "0", role: "region", "aria-label": `Heat maps of ${kernel}` })),
    )),
    BT.el("p", { class: "picked", id: "picked-words" }),
    BT.el("div", { id: "config-pair" }),
    BT.el("div", { id: "config-list" }),
  );
  BT.drawMaps(maps, signals);
  BT.drawConfigs();
};

// Moves the marks of the compared configs to their cells.
BT.markCompared = () => {
  const { maps, signals } = BT.maps;
  for (const cell of maps.flatMap(([, cells]) => cells)) cell.picked = BT.pickedAs(cell.index);
  BT.drawMaps(maps, signals);
};

BT.pickedAs = (index) => (index === undefined ? "" : ["a", "b"].filter((letter) => BT.state[letter] === index).join("").toUpperCase());

BT.ends = (values) => {
  if (!values.length) return { low: 0, high: 1 };
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (BT.state.measure !== "error") return { low, high };
  const far = Math.min(100, Math.max(Math.abs(low), Math.abs(high))); // errors beyond 100 % all look alike
  return { low: -far, high: far };
};

BT.drawMaps = (maps, signals) => {
  maps.forEach(([kernel, cells], number) => {
    const element = document.getElementById(`heat-${number}`);
    if (!element?.parentElement.open) return;
    const middle = (signals.low + signals.high) / 2;
    const far = (signals.high - signals.low) / 2 || 1;
    for (const cell of cells) cell.light = BT.isLight(cell.value, middle, far);
    BT.chart(`heat-${number}`, `heat-${BT.state.measure}`, { cells }, { signals, live: true, ready: (view) => BT.followMap(view, kernel) });
  });
};

// Whether a cell is light, so that its number must be dark: bright ends of viridis, the pale start of purples, and the
// middle of the diverging scheme.
BT.isLight = (value, middle, far) => {
  const place = (value - middle) / far;
  return { tflops: place > 0.1, share: place > 0.1, predicted: place < 0.1, error: Math.abs(place) < 0.6 }[BT.state.measure];
};

BT.followMap = (view, kernel) => {
  view.addEventListener("click", (event, item) => {
    const index = item?.datum?.index;
    if (index !== undefined) BT.change(event.shiftKey ? { b: index } : { a: index });
  });
  let wait = null;
  view.addSignalListener("brush", (name, chosen) => {
    clearTimeout(wait);
    wait = setTimeout(() => BT.brush(kernel, chosen), 250);
  });
};

// What a brush over the maps of a kernel selects; an empty one selects everything.
BT.brush = (kernel, { block_m: rows = [], block_n: columns = [] }) => {
  if (!rows.length && !columns.length) {
    if (BT.state.brush) BT.change({ brush: null });
    return;
  }
  const table = BT.table.columns;
  const kept = [...table.kernel.keys()].filter(
    (index) => table.kernel[index] === kernel && (!rows.length || rows.includes(table.block_m[index])) && (!columns.length || columns.includes(table.block_n[index])),
  );
  BT.change({ brush: new Set(kept) });
};

BT.sweepWords = () => {
  const table = BT.table;
  const best = BT.trial(BT.ranked(table)[0]);
  const timed = table.columns.score.filter((score) => score !== null).length;
  return `${table.label} on ${table.device}, measured on ${table.measured_on}, ${table.regime}: ${BT.number(timed)} of ${BT.number(table.columns.score.length)} configs have a time. The best, ${best.config}, takes ${BT.us(best.time_us)}: ${BT.number(best.tflops)} TFLOP/s.`;
};

BT.addView("sweeps", BT.drawHeatMaps, ["sweep", "measure"]);
BT.onChange((names) => {
  if (BT.table && !BT.nothing() && names.some((name) => ["a", "b"].includes(name)) && !names.includes("sweep") && !BT.views.get("sweeps").stale) {
    BT.markCompared();
    BT.drawConfigs();
  }
});
