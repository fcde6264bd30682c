// One kernel on two GPUs, its resources as sliders.
BT.explorer = { registers: 128, shared_bytes: 65536, num_warps: 4, stages: null, carveout: null, source: null };

BT.limitsOf = (gpu) => BT.data.limits[BT.data.devices.find((device) => device.id === gpu).cc];

BT.explored = () => ({
  registers: BT.explorer.registers,
  shared_bytes: BT.explorer.shared_bytes,
  static_shared_bytes: BT.explorer.source?.static_shared_bytes ?? 0,
  num_warps: BT.explorer.num_warps,
  barriers: BT.explorer.source?.barriers ?? 1,
});

// Takes the resources of a compiled config over.
BT.explore = (index) => {
  const row = BT.trial(index);
  if (row.registers === null) return;
  BT.explorer = {
    registers: row.registers,
    shared_bytes: row.shared_bytes,
    num_warps: row.block_warps,
    stages: row.num_stages,
    carveout: BT.explorer.carveout,
    source: row,
  };
};

// Compiled configs that differ from the explored one in a single number, the fastest of each.
BT.neighbours = () => {
  const source = BT.explorer.source;
  if (!source) return [];
  const sizes = ["block_m", "block_n", "num_warps", "num_stages"];
  const found = new Map();
  for (const index of BT.ranked(BT.table)) {
    const columns = BT.table.columns;
    if (columns.kernel[index] !== source.kernel || columns.registers[index] === null) continue;
    const changed = sizes.filter((name) => columns[name][index] !== source[name]);
    if (changed.length !== 1) continue;
    const key = `${changed[0]} ${columns[changed[0]][index]}`;
    if (!found.has(key)) found.set(key, { ...BT.trial(index), changed: changed[0] });
  }
  return [...found.values()];
};

BT.sliders = () => {
  const most = Math.max(...["gpuA", "gpuB"].map((gpu) => BT.limitsOf(BT.state[gpu]).shared_per_block_optin_bytes));
  return [
    ["registers", "Registers per thread", 0, BT.data.hardware.max_registers_per_thread, 1, BT.number],
    ["shared_bytes", "Shared memory of a block", 0, most, 8, (value) => `${BT.number(value / BT.KIB, 1)} KiB`],
    ["num_warps", "Warps of a block", 1, 32, 1, BT.number],
  ];
};

BT.slider = ([name, words, low, high, step, shown]) => {
  const output = BT.el("output", { for: `slide-${name}` }, shown(BT.explorer[name]));
  const input = BT.el("input", {
    type: "range", id: `slide-${name}`, min: low, max: high, step, value: BT.explorer[name],
    oninput: (event) => {
      BT.explorer[name] = Number(event.target.value);
      output.textContent = shown(BT.explorer[name]);
      BT.showExplored();
    },
  });
  return BT.el("label", { class: "slide", for: `slide-${name}` }, BT.el("span", {}, words, " ", output), input);
};

// Stages are those that were compiled: each has registers and shared memory of its own.
BT.stageSlider = () => {
  const source = BT.explorer.source;
  if (!source) return null;
  const staged = [source, ...BT.neighbours().filter((row) => row.changed === "num_stages")];
  staged.sort((x, y) => x.num_stages - y.num_stages);
  const at = staged.findIndex((row) => row.index === source.index);
  return BT.el(
    "label",
    { class: "slide", for: "slide-stages" },
    BT.el("span", {}, "Pipeline stages, as compiled ", BT.el("output", {}, String(source.num_stages))),
    BT.el("input", {
      type: "range", id: "slide-stages", min: 0, max: Math.max(0, staged.length - 1), step: 1, value: at,
      "aria-valuetext": `${source.num_stages} stages`, disabled: staged.length < 2,
      oninput: (event) => {
        BT.explore(staged[Number(event.target.value)].index);
        BT.drawExplorer();
        document.getElementById("slide-stages").focus();
      },
    }),
  );
};

BT.carveoutSlider = () => {
  const output = BT.el("output", {}, BT.carveoutWords());
  return BT.el(
    "label",
    { class: "slide", for: "slide-carveout" },
    BT.el("span", {}, "Carve-out of shared memory ", output),
    BT.el("input", {
      type: "range", id: "slide-carveout", min: 0, max: 101, step: 1, value: BT.explorer.carveout ?? 101,
      oninput: (event) => {
        const value = Number(event.target.value);
        BT.explorer.carveout = value > 100 ? null : value;
        output.textContent = BT.carveoutWords();
        BT.showExplored();
      },
    }),
  );
};
BT.carveoutWords = () => (BT.explorer.carveout === null ? "maximum" : `${BT.explorer.carveout} %`);

BT.gpuChoice = (letter) =>
  BT.selectOf(
    `gpu-${letter}`,
    `GPU ${letter}`,
    BT.data.devices.map((device) => [device.id, `${device.name} (${device.cc})`]),
    BT.state[`gpu${letter}`],
    (id) => BT.change({ [`gpu${letter}`]: id }),
  );

BT.drawExplorer = () => {
  const subject = BT.explorer.source
    ? `Starting from ${BT.explorer.source.config}, as compiled for compute capability ${BT.table.limits.cc}. Both GPUs show these resources; for another capability the compiler would choose other registers.`
    : "Free numbers: no compiled config is loaded.";
  BT.fill(
    "occupancy-body",
    BT.el(
      "div",
      { class: "columns" },
      BT.el(
        "div",
        { class: "panel" },
        BT.el("p", { class: "quiet" }, subject),
        BT.state.a === null
          ? null
          : BT.el("p", {}, BT.button("Take config A", () => BT.takeConfig("a")), " ", BT.button("Take config B", () => BT.takeConfig("b"))),
        BT.sliders().map(BT.slider),
        BT.stageSlider(),
        BT.carveoutSlider(),
      ),
      ["A", "B"].map((letter) =>
        BT.el("div", { class: "panel" }, BT.gpuChoice(letter), BT.el("div", { id: `answer-${letter}`, "aria-live": "polite" })),
      ),
    ),
    BT.el("div", { id: "largest-tiles" }),
    BT.el("h3", {}, "Blocks per multiprocessor over each resource"),
    BT.el("p", { class: "quiet" }, "Large dot: this kernel. Small dots: compiled configs that differ in one number. A is solid, B dashed."),
    BT.el(
      "div",
      { class: "grid" },
      BT.shownCurves().map((name) => BT.el("div", { class: "chart small", id: `curve-${name}` })),
    ),
  );
  BT.showExplored();
};

// Stages are those of compiled configs: without a sweep there is nothing to draw.
BT.shownCurves = () => Object.keys(BT.CURVES).filter((name) => name !== "stages" || BT.explorer.source);

BT.takeConfig = (letter) => {
  if (BT.state[letter] === null) return;
  BT.explore(BT.state[letter]);
  BT.drawExplorer();
};

BT.showExplored = () => {
  for (const letter of ["A", "B"]) {
    const limits = BT.limitsOf(BT.state[`gpu${letter}`]);
    const result = BT.occupancy(BT.explored(), limits, BT.data.hardware, BT.explorer.carveout);
    BT.fill(`answer-${letter}`, BT.answer(result, limits), BT.multiprocessor(result, limits), BT.pieceLegend(result, limits));
  }
  BT.drawCurves();
  BT.fill("largest-tiles", BT.largestTiles());
};

BT.LIMIT_WORDS = { warps: "warps", blocks: "blocks", registers: "registers", shared_memory: "shared memory", barriers: "barriers" };

BT.answer = (result, limits) => {
  const fraction = result.warps / limits.max_warps_per_sm;
  const rows = BT.LIMITERS.filter((name) => result.by[name] !== null).map((name) => [
    BT.LIMIT_WORDS[name],
    BT.el("span", { class: result.binding.includes(name) ? "binds" : "" }, String(result.by[name])),
  ]);
  return [
    BT.el("p", { class: "big" }, `${BT.count(result.blocks, "block")}/SM`),
    BT.el("p", {}, `${result.warps} of ${limits.max_warps_per_sm} warps, ${BT.percent(fraction)} occupancy. Limited by ${result.binding.map((name) => BT.LIMIT_WORDS[name]).join(" and ")}.`),
    BT.el("p", { class: "next" }, BT.nextStep(result, limits)),
    BT.tableOf(["limit", "blocks that it allows"], rows),
  ];
};

// What has to change for one more block, by the least amount.
BT.nextStep = (result, limits) => {
  const kernel = BT.explored();
  const blocks = result.blocks + 1;
  if (blocks > limits.max_blocks_per_sm) return "An SM holds no more blocks, however small.";
  const need = BT.requirement(blocks, kernel.num_warps, limits, BT.data.hardware, BT.explorer.carveout);
  const asked = kernel.shared_bytes + kernel.static_shared_bytes;
  const changes = [];
  if (need.num_warps === null || kernel.num_warps > need.num_warps) changes.push([`at most ${need.num_warps ?? 0} warps`, need.num_warps]);
  if (kernel.registers > (need.registers ?? -1)) changes.push([`−${kernel.registers - need.registers} registers`, need.registers]);
  if (asked > (need.shared_bytes ?? -1)) changes.push([`−${BT.bytes(asked - need.shared_bytes)} of shared memory`, need.shared_bytes]);
  if (need.barriers !== null && kernel.barriers > need.barriers) changes.push([`at most ${need.barriers} barriers`, need.barriers]);
  if (changes.some(([, value]) => value === null)) return `${BT.count(blocks, "block")} of ${kernel.num_warps} warps are impossible here: fewer warps are needed.`;
  return `${changes.map(([words]) => words).join(" and ")} → ${BT.count(blocks, "block")}`;
};

BT.largestTiles = () => {
  if (!BT.table || BT.nothing()) return null;
  const limits = BT.limitsOf(BT.state.gpuA);
  const columns = BT.table.columns;
  const rows = [];
  for (let blocks = 1; blocks <= 4; blocks += 1) {
    let best = null;
    for (const index of BT.ranked(BT.table)) {
      if (columns.registers[index] === null || columns.spill_bytes[index]) continue;
      const kernel = { ...BT.trial(index), num_warps: columns.block_warps[index] };
      if (BT.occupancy(kernel, limits, BT.data.hardware).blocks < blocks) continue;
      if (!best || kernel.block_m * kernel.block_n > best.block_m * best.block_n) best = kernel;
    }
    if (best) rows.push([String(blocks), `${best.block_m} x ${best.block_n}`, best.config, BT.number(best.registers), BT.bytes(best.shared_bytes), BT.us(best.time_us)]);
  }
  const name = BT.data.devices.find((device) => device.id === BT.state.gpuA).name;
  const title = BT.el("h3", {}, "The largest tile that keeps two blocks, or another number");
  const table = BT.tableOf(["blocks/SM at least", "tile", "config", "registers", "shared memory", "measured"], rows, `The largest tiles of this sweep that keep a number of blocks on ${name} and spill no registers, the fastest of equals`);
  return [title, table];
};

BT.addView("occupancy", () => {
  if (BT.state.a !== null && !BT.explorer.source) BT.explore(BT.state.a);
  BT.drawExplorer();
}, ["sweep", "gpuA", "gpuB"]);
