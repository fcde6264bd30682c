// The two configs that are compared, and a list of all of them that the keyboard reaches.
BT.drawConfigs = () => {
  BT.fill("picked-words", BT.pickedWords());
  BT.fill("config-pair", BT.el("div", { class: "columns" }, ["a", "b"].map(BT.configPanel)));
  BT.fill("config-list", BT.configList());
};

// What a click found, in sight wherever in the maps it was.
BT.pickedWords = () => {
  if (BT.state.a === null) return null;
  const row = BT.trial(BT.state.a);
  const [first] = BT.whyWords(row).split(/(?<=\.) /);
  return [BT.el("b", {}, `A: ${row.config}. `), `${first} `, BT.el("a", { href: "#config-a" }, "Why, and what it takes ↓")];
};

BT.configPanel = (letter) => {
  const index = BT.state[letter];
  if (index === null) return BT.el("div", { class: "panel" }, BT.message("No config is chosen."));
  const row = BT.trial(index);
  const facts = [
    ["measured", `${BT.us(row.time_us)}, ${BT.number(row.tflops, 1)} TFLOP/s`],
    ["rounds", row.rounds ? `${row.rounds}, from ${BT.us(row.low_us)} to ${BT.us(row.high_us)}` : "–"],
    ["predicted", BT.predicted(row)],
    ["registers", `${BT.number(row.registers)} per thread${row.spill_bytes ? `, ${BT.bytes(row.spill_bytes)} spilled` : ", none spilled"}`],
    ["shared memory", BT.bytes(row.shared_bytes)],
    ["blocks/SM", `${BT.number(row.blocks_per_sm)} of ${BT.number(row.block_warps)} warps`],
    ["device memory", row.bytes_once === null ? "–" : `${BT.number(row.bytes_once / 1e9, 3)} GB, ${BT.number(row.bytes_uncached / 1e9, 2)} GB without a cache (by the model)`],
    ["state of the GPU", BT.stateWords(row)],
  ];
  const code = BT.tritonConfig(row);
  return BT.el(
    "div",
    { class: "panel", id: `config-${letter}` },
    BT.el("h3", {}, `${letter.toUpperCase()}: ${row.config}`),
    BT.el("p", {}, BT.whyWords(row)),
    BT.tableOf(["", ""], facts),
    BT.el("p", { class: "code" }, BT.el("code", {}, code), " ", BT.button("Copy", (event) => BT.copy(code, event.target))),
    BT.el("p", {}, BT.button("Open in the explorer", () => { BT.takeConfig(letter); document.getElementById("occupancy").scrollIntoView(); })),
    row.index === BT.ranked(BT.table)[0] && BT.table.explanation
      ? BT.el("details", {}, BT.el("summary", {}, "Explained by the models"), BT.el("pre", {}, BT.table.explanation))
      : null,
  );
};

// Why a config is slower than the best one, by what the model says grew most.
BT.whyWords = (row) => {
  const best = BT.trial(BT.ranked(BT.table)[0]);
  if (row.score === null) return `It has no time: ${row.error_text || row.outcome.replaceAll("_", " ")}.`;
  if (row.index === best.index) return "The best of this sweep.";
  const words = [`${BT.number(row.score / best.score, 2)} times the time of the best.`];
  if (row.spill_bytes > best.spill_bytes) words.push(`It has no room for its tiles in registers: ${BT.bytes(row.spill_bytes)} per thread are spilled to memory.`);
  const grown = Object.keys(BT.table.terms).map((term) => [term, (row[term] ?? 0) - (best[term] ?? 0)]).sort((one, two) => two[1] - one[1])[0];
  if (grown && grown[1] > 0.01 * best.time_us) words.push(`By the model, what grows most is ${BT.table.terms[grown[0]]}: ${BT.us(row[grown[0]])} against ${BT.us(best[grown[0]])}.`);
  else if (row.total_us !== null) words.push("No lane of the model grows by more than 1 %.");
  return words.join(" ");
};

BT.stateWords = (row) => {
  const facts = [];
  if (row.sm_clock_mhz !== null) facts.push(`${BT.number(row.sm_clock_mhz)} MHz`);
  if (row.temperature_c !== null) facts.push(`${row.temperature_c} °C`);
  if (row.power_w !== null) facts.push(`${BT.number(row.power_w)} W`);
  if (row.throttle_reasons !== null) facts.push(BT.throttledWords(row.throttle_reasons));
  return facts.join(", ") || "not recorded";
};

BT.throttledWords = (bits) => {
  const found = Object.entries(BT.data.throttled).filter(([bit]) => bits & Number(bit)).map(([, words]) => words);
  return found.join(", ") || "not throttled";
};

BT.copy = async (text, button) => {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(button.parentElement.querySelector("code")); // the reader copies it by hand
    button.textContent = "Selected";
  }
};

BT.configList = () => {
  const order = BT.ranked(BT.table).filter(BT.isBrushed);
  const rows = order.slice(0, BT.LISTED).map((index) => {
    const row = BT.trial(index);
    const pick = (letter) => BT.button(letter.toUpperCase(), () => BT.change({ [letter]: index }), { "aria-label": `Compare ${row.config} as ${letter.toUpperCase()}`, "aria-pressed": String(BT.state[letter] === index) });
    return [BT.el("span", { class: "nowrap" }, pick("a"), " ", pick("b")), BT.el("span", { class: "nowrap" }, row.config), BT.us(row.time_us), BT.number(row.relative, 3), BT.number(row.tflops), BT.predicted(row), BT.number(row.registers), BT.bytes(row.spill_bytes), BT.number(row.blocks_per_sm)];
  });
  const caption = `${BT.state.brush ? "Brushed" : "All"} configs, by the time over that of the anchor in the same rounds: ${rows.length} of ${BT.number(order.length)}`;
  return [
    BT.tableOf(["compare", "config", "measured", "over the anchor", "TFLOP/s", "predicted", "registers", "spilled", "blocks/SM"], rows, caption),
    order.length > rows.length ? BT.button("Show more", () => { BT.LISTED *= 4; BT.drawConfigs(); }) : null,
    BT.state.brush ? BT.button("Show all configs again", () => BT.change({ brush: null })) : null,
  ];
};

BT.onChange((names) => {
  if (BT.table && !BT.nothing() && names.includes("brush") && !names.includes("sweep") && !BT.views.get("sweeps").stale) BT.drawConfigs();
});
