// The drawing of one multiprocessor, and the curves of its blocks over each resource.
BT.BLOCK_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7f7f7f"];
BT.TILE_COLOURS = ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#b8a800", "#d55e00"];

// Four partitions with their warps, and the shared memory filled by the tiles of every block.
BT.multiprocessor = (result, limits) => {
  const width = 320;
  const warpRows = Math.ceil(limits.max_warps_per_sm / limits.sub_partitions / 8);
  const height = 24 + warpRows * 12 + 46;
  const words = `One multiprocessor: ${BT.count(result.blocks, "block")} with ${result.warps} warps in ${limits.sub_partitions} partitions.`;
  const drawing = BT.svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words, class: "sm" });
  for (let part = 0; part < limits.sub_partitions; part += 1) BT.drawPartition(drawing, part, result, limits, warpRows);
  BT.drawShared(drawing, 40 + warpRows * 12, width, result, limits);
  return drawing;
};

BT.drawPartition = (drawing, part, result, limits, warpRows) => {
  const left = part * 80;
  const slots = Math.floor(limits.max_warps_per_sm / limits.sub_partitions);
  drawing.append(BT.svg("rect", { x: left + 1, y: 1, width: 78, height: 20 + warpRows * 12, class: "outline" }));
  drawing.append(BT.svg("text", { x: left + 6, y: 13, class: "tiny" }, `partition ${part}`));
  for (let slot = 0; slot < slots; slot += 1) {
    const warp = slot * limits.sub_partitions + part; // warps are dealt out in turns
    const block = warp < result.warps ? Math.floor(warp / (result.warps / result.blocks)) : null;
    const square = BT.svg("rect", {
      x: left + 5 + (slot % 8) * 9, y: 18 + Math.floor(slot / 8) * 12, width: 8, height: 10,
      fill: block === null ? "none" : BT.BLOCK_COLOURS[block % BT.BLOCK_COLOURS.length], class: "slot",
    });
    square.append(BT.svg("title", {}, block === null ? "free" : `block ${block}, warp ${warp}`));
    drawing.append(square);
  }
};

BT.drawShared = (drawing, top, width, result, limits) => {
  const scale = (width - 2) / limits.shared_per_sm_bytes;
  const free = Math.max(0, result.capacity - result.blocks * result.blockShared);
  drawing.append(BT.svg("text", { x: 1, y: top - 5, class: "tiny" }, `shared memory: ${BT.number(result.capacity / BT.KIB)} of ${BT.number(limits.shared_per_sm_bytes / BT.KIB)} KiB, ${BT.number(free / BT.KIB, 1)} KiB free`));
  drawing.append(BT.svg("rect", { x: 1, y: top, width: width - 2, height: 26, class: "outline" }));
  drawing.append(BT.svg("rect", { x: 1, y: top, width: result.capacity * scale, height: 26, class: "room" }));
  let left = 1;
  for (let block = 0; block < result.blocks; block += 1) {
    let number = 0;
    for (const [name, bytes] of BT.pieces(result, limits)) {
      const piece = BT.svg("rect", { x: left, y: top, width: Math.max(0, bytes * scale - 0.6), height: 26, fill: BT.TILE_COLOURS[number % BT.TILE_COLOURS.length], class: "slot" });
      piece.append(BT.svg("title", {}, `block ${block}: ${name}, ${BT.bytes(bytes)}`));
      drawing.append(piece);
      if (bytes * scale > 6.5 * name.length + 4) drawing.append(BT.svg("text", { x: left + 3, y: top + 17, class: "tiny dark" }, name));
      left += bytes * scale;
      number += 1;
    }
  }
};

// What the colours of the drawing are, with the KiB of each.
BT.pieceLegend = (result, limits) =>
  BT.el(
    "ul",
    { class: "legend", "aria-label": "Shared memory of a block, KiB" },
    BT.pieces(result, limits).map(([name, bytes], number) =>
      BT.el("li", {}, BT.swatch(BT.TILE_COLOURS[number % BT.TILE_COLOURS.length]), `${name} ${BT.number(bytes / BT.KIB, 1)} KiB`),
    ),
  );

BT.swatch = (fill) => BT.svg("svg", { viewBox: "0 0 10 10", class: "swatch", "aria-hidden": "true" }, BT.svg("rect", { width: 10, height: 10, fill }));

// The shared memory of a block by tile; as one piece where the sliders have left what was compiled.
BT.pieces = (result, limits) => {
  const source = BT.explorer.source;
  const kernel = BT.explored();
  const asked = kernel.shared_bytes + kernel.static_shared_bytes;
  const reserve = result.blockShared - asked;
  const end = reserve > 0 ? [["reserve", reserve]] : [];
  const whole = [["shared", asked], ...end];
  if (!source || source.layout === null || kernel.shared_bytes !== source.shared_bytes) return whole;
  const tiles = BT.table.layouts[source.layout].filter((tile) => tile.place === "shared memory" && tile.bytes > 0);
  const known = tiles.reduce((sum, tile) => sum + tile.bytes, 0);
  if (!tiles.length || known > asked) return whole;
  const named = tiles.map((tile) => [tile.count > 1 ? `${tile.name}×${tile.count}` : tile.name, tile.bytes]);
  return [...named, ...(asked > known ? [["other", asked - known]] : []), ...end];
};

// Over each resource: the values of its axis, the kernel with such a value, and where the kernel itself stands.
BT.CURVES = {
  registers: { values: () => BT.range(1, 255, 1), set: (value) => ({ registers: value }), at: (kernel) => kernel.registers },
  shared: {
    values: () => BT.range(0, 228, 0.5),
    set: (value) => ({ shared_bytes: value * BT.KIB }),
    at: (kernel) => kernel.shared_bytes / BT.KIB,
  },
  warps: { values: () => BT.range(1, 32, 1), set: (value) => ({ num_warps: value }), at: (kernel) => kernel.num_warps },
  stages: { values: () => [], set: () => ({}), at: (kernel, row) => row?.num_stages ?? null },
  carveout: { values: () => BT.range(0, 100, 1), set: () => ({}), at: () => BT.explorer.carveout ?? 100 },
};

BT.range = (low, high, step) => Array.from({ length: Math.round((high - low) / step) + 1 }, (_, index) => low + index * step);

BT.drawCurves = () => {
  for (const name of BT.shownCurves()) {
    const curve = [];
    const here = [];
    for (const gpu of ["A", "B"]) {
      curve.push(...BT.steps(name, gpu));
      here.push(...BT.dots(name, gpu));
    }
    BT.chart(`curve-${name}`, `curve-${name}`, { curve, here }, { live: true });
  }
};

// The ends of a curve and the points at which it changes.
BT.steps = (name, gpu) => {
  if (name === "stages") return BT.dots(name, gpu).sort((one, two) => one.x - two.x);
  const { values, set } = BT.CURVES[name];
  const limits = BT.limitsOf(BT.state[`gpu${gpu}`]);
  const rows = values().map((x) => {
    const percent = name === "carveout" ? x : BT.explorer.carveout;
    return { gpu, x, blocks: BT.occupancy({ ...BT.explored(), ...set(x) }, limits, BT.data.hardware, percent).blocks };
  });
  return rows.filter((row, index) => index === 0 || index === rows.length - 1 || row.blocks !== rows[index - 1].blocks);
};

BT.dots = (name, gpu) => {
  const limits = BT.limitsOf(BT.state[`gpu${gpu}`]);
  const { at } = BT.CURVES[name];
  const dot = (kernel, row, which) => ({
    gpu, kernel: which, x: at(kernel, row), label: row?.config ?? "as set by the sliders",
    blocks: BT.occupancy(kernel, limits, BT.data.hardware, BT.explorer.carveout).blocks,
  });
  const own = dot(BT.explored(), BT.explorer.source, "this");
  if (name === "carveout") return [own];
  const near = name === "stages" ? BT.neighbours().filter((row) => row.changed === "num_stages") : BT.neighbours();
  const dots = near.map((row) => dot({ ...row, num_warps: row.block_warps }, row, "neighbour"));
  return [...dots, own].filter((each) => each.x !== null);
};
