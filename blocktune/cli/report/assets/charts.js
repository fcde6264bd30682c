// Vega-Lite charts: each figure holds one, which is drawn again when its data or the colours of the page change.
BT.figures = new Map();

BT.isDark = () => document.documentElement.dataset.theme === "dark";

// Charts with long names at their side keep this width and scroll on a phone.
BT.LEAST_WIDTH = { finalists: 340, contenders: 350, differences: 560, roofline: 350, ladder: 350, "counter-ratios": 350, "stall-reasons": 350 };

// Of small multiples: what a row of them takes besides its plots, on a desk and on a phone, its plots, and the widest.
BT.FACETS = {
  lanes: { margins: [300, 190], plots: 1, widest: 640 },
  states: { margins: [70, 60], plots: 1, widest: 860 },
  "block-sizes": { margins: [130, 136], plots: 2, widest: 300 },
};

// A map of shapes with the names at its side.
BT.MAP_WIDTH = 430;
BT.NARROW = 500;

// Charts of small multiples do not follow the page by themselves.
BT.fitFacets = (spec, name, width) => {
  if (name === "finalists" && width < BT.NARROW) for (const layer of spec.layer) if (layer.encoding.y) layer.encoding.y.axis.labelLimit = 150;
  if ("columns" in spec) spec.columns = width < 2 * BT.MAP_WIDTH ? 1 : 2;
  if (!(name in BT.FACETS)) return;
  const narrow = width < BT.NARROW;
  const { margins, plots, widest } = BT.FACETS[name];
  if (name === "lanes" && narrow) BT.foldLabels(spec.spec);
  spec.spec.width = Math.max(100, Math.min(widest, (width - margins[narrow ? 1 : 0]) / plots));
};

// Names of lanes in two lines, where the page is narrow.
BT.foldLabels = (spec) => {
  Object.assign(spec.layer[0].encoding.y.axis, { labelLimit: 170, labelExpr: "split(datum.label, '\\n')" });
  spec.height = { step: 30 };
};
BT.folded = (words) => {
  const spaces = [...words.matchAll(/ /g)].map((found) => found.index);
  const nearest = spaces.sort((one, two) => Math.abs(one - words.length / 2) - Math.abs(two - words.length / 2))[0];
  return nearest === undefined ? words : `${words.slice(0, nearest)}\n${words.slice(nearest + 1)}`;
};

// The colours of the page; on a narrow one, legends have a line for each name.
BT.themeOf = (width) => {
  const theme = BT.data.themes[BT.isDark() ? "dark" : "light"];
  return width < BT.NARROW ? { ...theme, legend: { ...theme.legend, columns: 1 } } : theme;
};

// A copy of a spec in the colours of the page: on a dark one, the dark ones of the palette become brighter.
BT.coloured = (spec) => {
  let text = JSON.stringify(spec);
  if (BT.isDark()) for (const [colour, brighter] of Object.entries(BT.data.brighter)) text = text.replaceAll(colour, brighter);
  return JSON.parse(text);
};

// The height of a chart with a step for each row, in pixels: Vega-Lite warns of steps where the width is fitted.
BT.heightOf = (spec, sets) => {
  if (!spec.height?.step) return spec.height;
  const part = spec.encoding ? spec : spec.layer.find((layer) => layer.encoding.y?.field);
  const rows = sets[(part.data ?? spec.data).name];
  return spec.height.step * Math.max(1, new Set(rows.map((row) => row[part.encoding.y.field])).size);
};

// Draws the chart `name` into the element `id` with these data sets. `ready` gets the view, for its events. A `live`
// chart that is there already gets the new rows instead.
BT.chart = async (id, name, sets, { signals = {}, ready = null, edit = null, live = false } = {}) => {
  const element = document.getElementById(id);
  if (!element) return;
  const ticket = Symbol(name);
  const before = BT.figures.get(id);
  const height = BT.heightOf(BT.data.charts[name], sets);
  const same =
    live && before?.height === height && before?.view?.container()?.isConnected && before.name === name && before.dark === BT.isDark();
  BT.figures.set(id, { name, sets, signals, ready, edit, ticket, live, height, dark: BT.isDark(), view: same ? before.view : null });
  if (same) {
    for (const [signal, value] of Object.entries(signals)) before.view.signal(signal, value);
    for (const [set, rows] of Object.entries(sets)) before.view.data(set, structuredClone(rows)); // Vega keeps marks of its own in rows
    await before.view.runAsync();
    return;
  }
  element.dataset.state = "drawing";
  const spec = BT.coloured(BT.data.charts[name]);
  spec.datasets = structuredClone(sets);
  if (height) spec.height = height;
  if (edit) edit(spec);
  BT.fitFacets(spec, name, element.clientWidth);
  const width = element.clientWidth;
  if (spec.width === "container") {
    spec.width = Math.max(BT.LEAST_WIDTH[name] ?? 160, Math.min(width - 8, 860));
    spec.autosize = { type: "fit-x", contains: "padding" };
  }
  const box = BT.el("div", {});
  const result = await vegaEmbed(box, spec, {
    mode: "vega-lite",
    ast: true,
    actions: false,
    defaultStyle: false, // the page has its own
    logLevel: 1, // errors only
    renderer: "svg",
    config: BT.themeOf(width),
    tooltip: { theme: BT.isDark() ? "dark" : "light", disableDefaultStyle: true },
    patch: (vega) => {
      for (const signal of vega.signals || []) if (signal.name in signals) signal.value = signals[signal.name];
      return vega;
    },
  });
  if (BT.figures.get(id).ticket !== ticket) {
    result.finalize();
    return; // newer data came meanwhile
  }
  element.replaceChildren(box);
  element.dataset.state = "drawn";
  BT.figures.get(id).view = result.view;
  if (ready) ready(result.view);
};

BT.redrawAll = () => {
  for (const [id, figure] of BT.figures) BT.chart(id, figure.name, figure.sets, figure);
};

// The views of the page: each is drawn when it first comes near the window, or when the browser has time.
BT.views = new Map();
BT.addView = (id, draw, concerns) => BT.views.set(id, { draw, concerns, near: false, stale: true });

BT.drawView = (id) => {
  const view = BT.views.get(id);
  if (!view.stale) return;
  view.stale = false;
  try {
    view.draw();
    BT.showMore();
  } catch (error) {
    BT.fill(`${id}-body`, BT.message(`This view cannot be drawn: ${error.message}`));
    throw error;
  }
};

BT.onChange((names) => {
  for (const [id, view] of BT.views) {
    if (!names.some((name) => view.concerns.includes(name))) continue;
    view.stale = true;
    if (view.near) BT.drawView(id);
  }
});

BT.watchViews = () => {
  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const view = BT.views.get(entry.target.id);
        view.near = view.near || entry.isIntersecting;
        if (entry.isIntersecting) BT.drawView(entry.target.id);
      }
    },
    { rootMargin: "300px" },
  );
  for (const id of BT.views.keys()) watcher.observe(document.getElementById(id));
  const rest = () => {
    const next = [...BT.views].find(([, view]) => view.stale);
    if (!next) return;
    next[1].near = true;
    BT.drawView(next[0]);
    later(rest);
  };
  const later = window.requestIdleCallback || ((work) => setTimeout(work, 50));
  later(rest);
};
