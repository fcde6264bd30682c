"use strict";
// What the reader has chosen, and who wants to know when that changes.
const BT = {};

BT.data = null; // what every view needs at once
BT.table = null; // the chosen sweep, null where there is none
BT.state = { sweep: -1, a: null, b: null, brush: null, measure: "tflops", gpuA: null, gpuB: null };

BT.listeners = [];
BT.onChange = (listener) => BT.listeners.push(listener);
BT.change = (choices) => {
  Object.assign(BT.state, choices);
  const names = Object.keys(choices);
  for (const listener of BT.listeners) listener(names);
};

// The value of a block of data: JSON in gzip in base64.
BT.unpack = async (id) => {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

BT.chooseSweep = async (index) => {
  const ticket = (BT.choosing = Symbol("sweep"));
  const table = index < 0 ? null : await BT.unpack(`sweep-${index}`);
  if (ticket !== BT.choosing) return; // another one was chosen meanwhile
  BT.table = table;
  const order = BT.table ? BT.ranked(BT.table) : [];
  BT.change({ sweep: index, a: order[0] ?? null, b: BT.rival(order), brush: null });
};

// Why the chosen sweep has nothing to show; empty where it has something.
BT.nothing = () => {
  if (BT.state.a !== null) return "";
  const outcomes = [...new Set(BT.table.columns.outcome)].map((each) => each.replaceAll("_", " "));
  const errors = BT.table.columns.error_text.filter(Boolean);
  return `No config of ${BT.table.label} has a time: ${outcomes.join(", ")}. ${errors[0] ?? ""}`;
};

// Parts without data are left out. What would fill them, by part; the end of the page lists it.
BT.hints = new Map();
BT.hint = (part, isThere, words) => {
  if (isThere) BT.hints.delete(part);
  else BT.hints.set(part, words);
};
BT.NO_SWEEP = "Every config of a shape as heat maps, where its time goes, and how the search went: `tune run` on a GPU, with `--exhaustive` for every config.";

// The trials with a time, fastest first.
BT.ranked = (table) => {
  const scores = table.columns.score;
  return [...scores.keys()].filter((index) => scores[index] !== null).sort((x, y) => scores[x] - scores[y]);
};

// What the fastest config is compared with at first: the fastest one of another kernel, else the next one.
BT.rival = (order) => {
  if (order.length < 2) return null;
  const kernels = BT.table.columns.kernel;
  return order.find((index) => kernels[index] !== kernels[order[0]]) ?? order[1];
};

BT.trial = (index) => {
  const row = { index };
  for (const [name, column] of Object.entries(BT.table.columns)) row[name] = column[index];
  row.config = BT.label(row);
  row.tflops = row.time_us === null ? null : BT.table.flops / row.time_us / 1e6;
  row.predicted_tflops = row.total_us === null ? null : BT.table.flops / row.total_us / 1e6;
  row.error = row.time_us === null || row.total_us === null ? null : row.total_us / row.time_us - 1;
  return row;
};

BT.bandOf = (row) => BT.table.bands[row.kernel] ?? "unchecked kernel";

BT.predicted = (row) => {
  if (row.total_us === null) return "not predicted";
  const off = row.error === null ? "" : `; ${BT.signed(BT.percent(row.error), row.error)} from the measured time`;
  return `${BT.us(row.total_us)}, ${BT.bandOf(row)}${off}`;
};

BT.label = (row) =>
  `${row.kernel} ${row.block_m}x${row.block_n} w${row.num_warps} s${row.num_stages}` +
  Object.entries(row.extra).map(([name, value]) => ` ${name}=${value}`).join("");

BT.isBrushed = (index) => BT.state.brush === null || BT.state.brush.has(index);

// As `tune export --format triton` writes it.
BT.tritonConfig = (row) => {
  const meta = { block_m: row.block_m, block_n: row.block_n, ...row.extra };
  const text = Object.entries(meta).map(([name, value]) => `'${name.toUpperCase()}': ${value}`).join(", ");
  return `triton.Config({${text}}, num_warps=${row.num_warps}, num_stages=${row.num_stages})`;
};
