// The live page: blocks of data come from the server, and what is new as events.
BT.live = { source: null, store: 0, number: 0, name: "", status: null, problem: "", unread: "", silent: false };

BT.ask = async (path, method = "GET", body = null) => {
  const more = body === null ? {} : { body: JSON.stringify(body), headers: { "content-type": "application/json" } };
  const response = await fetch(path, { method, cache: "no-store", ...more });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.message);
  return answer;
};

BT.unpack = (id) => (id === "data" ? BT.unpackData() : BT.unpackSweep(Number(id.slice("sweep-".length))));

BT.unpackData = async () => {
  const [data, overview] = await Promise.all([BT.ask("data"), BT.ask("overview")]);
  Object.assign(BT.live, { store: overview.number, problem: overview.problem });
  return { ...data, sweeps: overview.sweeps };
};

// A sweep that cannot be read is none, and the page says why.
BT.unpackSweep = async (index) => {
  const { id } = BT.data.sweeps[index];
  try {
    const { number, status, table } = await BT.ask(`table/${encodeURIComponent(id)}`);
    Object.assign(BT.live, { name: id, number, status, unread: "" });
    return table;
  } catch (error) {
    Object.assign(BT.live, { name: id, number: 0, status: null, unread: error.message });
    return null;
  }
};

BT.firstSweep = () => 0; // the youngest

BT.NO_SWEEP = "A search, as soon as one measures: `tune run` on a GPU, and what it stores appears here.";

// Follows the chosen sweep; the browser connects again by itself and says what it has seen.
BT.follow = () => {
  BT.live.source?.close();
  const { store, number, name } = BT.live;
  const source = new EventSource(`events?seen=${store}.${number}&sweep=${encodeURIComponent(name)}`);
  BT.live.source = source;
  const on = (kind, act) =>
    source.addEventListener(kind, (event) => {
      [BT.live.store, BT.live.number] = event.lastEventId.split(".").map(Number);
      act(JSON.parse(event.data));
      BT.showLive();
    });
  on("rows", BT.takeRows);
  on("table", () => BT.chooseSweep(BT.state.sweep));
  on("again", BT.readAgain);
  on("status", BT.takeStatus);
  on("sweeps", BT.takeSweeps);
  on("problem", BT.takeProblem);
  source.addEventListener("open", () => BT.setSilent(false));
  source.addEventListener("error", () => BT.setSilent(true));
};

BT.setSilent = (silent) => {
  BT.live.silent = silent;
  BT.showLive();
};

BT.takeProblem = ({ text }) => {
  BT.live.problem = text;
  if (!text && !BT.table) BT.readAgain();
};

BT.readAgain = async () => {
  const { number, problem, sweeps } = await BT.ask("overview");
  const held = BT.live.name;
  Object.assign(BT.live, { store: number, problem });
  BT.data.sweeps = sweeps;
  const index = Math.max(0, sweeps.findIndex((sweep) => sweep.id === held));
  BT.drawChoice(index);
  await BT.chooseSweep(sweeps.length ? index : -1);
};

// New sweeps stand last, so that the numbers of the others stay; the first one of all is shown at once.
BT.takeSweeps = (found) => {
  const known = new Set(BT.data.sweeps.map((sweep) => sweep.id));
  BT.data.sweeps.push(...found.filter((sweep) => !known.has(sweep.id)));
  BT.drawChoice(Math.max(0, BT.state.sweep));
  if (BT.state.sweep < 0) BT.chooseSweep(0);
};

BT.takeStatus = (status) => {
  BT.live.status = status;
  const { winner } = status;
  if (!winner) return;
  BT.data.winners = [winner, ...BT.data.winners.filter((each) => each.label !== winner.label || each.device !== winner.device)];
  if (BT.isDrawn("runs")) BT.drawRuns();
  if (BT.isDrawn("search") && BT.table && !BT.nothing()) BT.fill("winners", BT.winnerTable() ?? []);
};

BT.takeRows = (update) => {
  const before = BT.ranked(BT.table);
  const [best, rival] = [before[0] ?? null, BT.rival(before)];
  BT.putRows(BT.table, update);
  const order = BT.ranked(BT.table);
  const choices = before.length ? { rows: BT.live.number } : { sweep: BT.state.sweep };
  if (BT.state.a === best && order[0] !== best) choices.a = order[0] ?? null; // who follows the best goes on
  if (BT.state.b === rival && BT.rival(order) !== rival) choices.b = BT.rival(order);
  BT.keepFocus(() => BT.change(choices));
};

BT.putRows = (table, { rows, columns, scores, facts }) => {
  for (const [name, values] of Object.entries(columns)) rows.forEach((row, place) => (table.columns[name][row] = values[place]));
  table.columns.score = scores;
  Object.assign(table, facts);
};

// Does work that draws elements again, and gives the keyboard back to the one that had it.
BT.keepFocus = (work) => {
  const held = document.activeElement;
  const label = held?.getAttribute("aria-label");
  work();
  if (!held || held.isConnected) return;
  const same = held.id ? document.getElementById(held.id) : [...document.querySelectorAll(held.tagName)].find((each) => label && each.getAttribute("aria-label") === label);
  same?.focus({ preventScroll: true });
};

BT.isDrawn = (view) => !BT.views.get(view).stale;

// What new rows change in views that are drawn; charts get the rows and stay.
BT.onChange((names) => {
  if (names.includes("sweep")) {
    BT.follow();
    BT.showLive();
    return;
  }
  if (!names.includes("rows")) return;
  if (BT.isDrawn("sweeps")) BT.refreshMaps();
  if (BT.isDrawn("search")) {
    BT.fill("throttled", BT.throttledVerdict());
    BT.drawProgress();
  }
  if (BT.isDrawn("shapes")) BT.chart("block-sizes", "block-sizes", { blocks: BT.blockSizes() }, { live: true });
  if (BT.isDrawn("occupancy")) BT.fill("largest-tiles", BT.largestTiles());
});

BT.refreshMaps = () => {
  const before = BT.maps.maps.map(([kernel]) => kernel).sort().join();
  const found = BT.mapsOf();
  if (found.maps.map(([kernel]) => kernel).sort().join() !== before) return BT.drawHeatMaps();
  const place = new Map(found.maps);
  BT.maps = { maps: BT.maps.maps.map(([kernel]) => [kernel, place.get(kernel)]), signals: found.signals };
  BT.fill("sweep-words", BT.sweepWords());
  BT.drawMaps(BT.maps.maps, BT.maps.signals);
  BT.drawConfigs();
};

BT.STATES = {
  running: "The search runs",
  finished: "The search is finished",
  stopped: "The search was stopped or killed: for two minutes no trial has come, and no winner after the last one. `tune run` with the same flags goes on where it ended",
  predicted: "Predicted, nothing was measured",
  recorded: "From a file",
};

BT.liveWords = () => {
  const { status } = BT.live;
  if (!status) return "";
  const last = status.last_at ? `, the last at ${status.last_at.slice(0, 19).replace("T", " ")} UTC` : "";
  return `${BT.STATES[status.state]}: ${BT.count(status.trials, "trial")}${last}.`;
};

BT.showLive = () => {
  const problems = [BT.live.problem || BT.live.unread, BT.live.silent ? "The server does not answer. The page shows what it had, and tries again." : ""];
  BT.fill("live", BT.liveWords());
  document.getElementById("live").dataset.state = BT.live.status?.state ?? "";
  BT.fill("problem", problems.filter(Boolean).map((text) => BT.message(text)));
};

document.querySelector("header").append(BT.el("p", { id: "live", class: "quiet", role: "status" }));
document.getElementById("summary").before(BT.el("div", { id: "problem", role: "alert" }));
