// Elements of the page. Text always becomes a text node: nothing from a store is ever read as HTML.
BT.el = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null));
  return element;
};

BT.svg = (tag, attributes = {}, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

BT.fill = (id, ...children) => document.getElementById(id).replaceChildren(...children.flat(Infinity).filter((c) => c !== null));

BT.message = (text) => BT.el("p", { class: "message", role: "note" }, text);

// The list of what else could be shown; a view without data is no frame and has no link.
BT.showMore = () => {
  document.getElementById("more").hidden = !BT.hints.size;
  BT.fill("more-body", [...BT.hints.values()].map((words) => BT.el("li", {}, words)));
};
BT.showView = (id, isThere) => {
  document.getElementById(id).hidden = !isThere;
  document.querySelector(`nav a[href="#${id}"]`).hidden = !isThere;
};

// A table of more than two columns becomes a list of named values where the page is narrow; the roles keep it a table to readers.
BT.tableOf = (columns, rows, caption = "") =>
  BT.el(
    "div",
    { class: "wide", tabindex: "0", role: "region", "aria-label": caption || columns.join(", ") },
    BT.el(
      "table",
      { class: columns.length > 2 ? "many" : "", role: "table" },
      caption ? BT.el("caption", {}, caption) : null,
      BT.el("thead", { role: "rowgroup" }, BT.el("tr", { role: "row" }, columns.map((name) => BT.el("th", { scope: "col", role: "columnheader" }, name)))),
      BT.el("tbody", { role: "rowgroup" }, rows.map((cells) => BT.el("tr", { role: "row" }, cells.map((cell, place) => BT.el("td", { class: BT.isShort(cell) ? "nowrap" : "", role: "cell", "data-name": columns[place] || null }, cell))))),
    ),
  );

// Numbers and names stay in one line; sentences are folded.
BT.isShort = (cell) => typeof cell === "string" && cell.length < 24;

// Names without the words that all of them have, and those words.
BT.unshared = (names) => {
  const words = names.map((name) => name.split(" "));
  const shared = names.length < 2 ? [] : words[0].filter((word) => words.every((each) => each.includes(word)));
  return { names: words.map((each) => each.filter((word) => !shared.includes(word)).join(" ")), shared: shared.join(" ") };
};

BT.button = (text, press, more = {}) => BT.el("button", { type: "button", onclick: press, ...more }, text);

// A button group of which one is pressed; `choose` gets its name.
BT.choices = (label, names, current, choose) =>
  BT.el(
    "div",
    { class: "choices", role: "group", "aria-label": label },
    Object.entries(names).map(([name, words]) =>
      BT.button(words, () => choose(name), { "aria-pressed": String(name === current), "data-name": name }),
    ),
  );

BT.selectOf = (id, label, options, current, choose) =>
  BT.el(
    "label",
    { class: "field" },
    label,
    BT.el(
      "select",
      { id, onchange: (event) => choose(event.target.value) },
      options.map(([value, words]) => BT.el("option", { value, selected: String(value) === String(current) }, words)),
    ),
  );

BT.number = (value, digits = 0) =>
  value === null || value === undefined
    ? "–"
    : value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
BT.us = (value) => (value === null || value === undefined ? "–" : `${BT.number(value, value < 100 ? 2 : 1)} µs`);
BT.percent = (fraction, digits = 1) => (fraction === null ? "–" : `${BT.number(100 * fraction, digits)} %`);
BT.signed = (text, value) => (value > 0 ? `+${text}` : text);
BT.bytes = (value) => (value === null || value === undefined ? "–" : `${BT.number(value)} B`);
BT.count = (value, noun) => `${BT.number(value)} ${noun}${value === 1 ? "" : "s"}`;
