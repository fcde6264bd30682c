// What if: a config that may never have been compiled, compiled by the server. One at a time; each can be cancelled.
BT.whatIf = { subject: null, kernels: [], kernel: "", jobs: [], watching: false };
BT.WHAT_IF_POLL_MS = 120;

document.getElementById("sweeps").after(
  BT.el(
    "section",
    { id: "what-if", "aria-labelledby": "what-if-title" },
    BT.el("h2", { id: "what-if-title" }, "What if"),
    BT.el("p", { class: "lead" }, "Compile a tile that was never tried: its registers, spills, blocks per multiprocessor and predicted time."),
    BT.el("div", { id: "what-if-form" }),
    BT.el("div", { id: "what-if-jobs", "aria-live": "polite" }),
  ),
);
document.querySelector("nav").children[1].after(BT.el("a", { href: "#what-if" }, "What if"));

// Takes a shape on a device as what the next compiles are for.
BT.subject = async ({ device, shape, label }) => {
  BT.whatIf.subject = { device, shape, label };
  try {
    BT.whatIf.kernels = await BT.ask("kernels", "POST", { device, shape });
  } catch (error) {
    BT.whatIf.kernels = [];
    return BT.fill("what-if-form", BT.message(error.message));
  }
  if (!BT.whatIf.kernels.some(({ name }) => name === BT.whatIf.kernel)) BT.whatIf.kernel = BT.whatIf.kernels[0]?.name ?? "";
  BT.drawWhatIf();
};

BT.drawWhatIf = () => {
  const { subject, kernels, kernel } = BT.whatIf;
  const chosen = kernels.find(({ name }) => name === kernel);
  if (!chosen) return BT.fill("what-if-form", BT.message(`No kernel computes ${subject.label} on ${subject.device}.`));
  const choose = (name) => {
    BT.whatIf.kernel = name;
    BT.drawWhatIf();
  };
  const fields = Object.entries(chosen.parameters).map(([name, values]) => BT.parameterField(name, values, chosen.default[name]));
  BT.fill(
    "what-if-form",
    BT.el("p", { class: "quiet" }, `For ${subject.label} on ${subject.device}. The fields begin with the kernel's default; a number that is not in the list may be typed.`),
    BT.el(
      "form",
      { class: "fields", onsubmit: (event) => { event.preventDefault(); BT.askWhatIf(chosen); } },
      BT.selectOf("what-if-kernel", "Kernel", kernels.map(({ name }) => [name, name]), kernel, choose),
      fields,
      BT.el("button", { type: "submit" }, "Compile"),
    ),
    BT.el("div", { id: "what-if-problem", role: "alert" }),
  );
};

BT.parameterField = (name, values, value) => {
  const [id, list] = [`what-if-${name}`, `what-if-list-${name}`];
  return BT.el(
    "label",
    { class: "field", for: id },
    name,
    BT.el("input", { id, type: "number", name, value, list, required: true, step: 1, min: 0 }),
    BT.el("datalist", { id: list }, values.map((each) => BT.el("option", { value: each }))),
  );
};

BT.askWhatIf = async ({ name, parameters }) => {
  const { device, shape } = BT.whatIf.subject;
  const chosen = Object.fromEntries(Object.keys(parameters).map((each) => [each, Number(document.getElementById(`what-if-${each}`).value)]));
  try {
    const job = await BT.ask("what-if", "POST", { device, shape, kernel: name, parameters: chosen });
    BT.whatIf.jobs.unshift({ ...job, subject: BT.whatIf.subject });
    BT.fill("what-if-problem");
    BT.drawJobs();
    BT.watchJobs();
  } catch (error) {
    BT.fill("what-if-problem", BT.message(error.message));
  }
};

BT.isOpen = (job) => job.state === "waiting" || job.state === "compiling";

// Looks after the compiles until all of them are done.
BT.watchJobs = async () => {
  if (BT.whatIf.watching) return;
  BT.whatIf.watching = true;
  try {
    while (BT.whatIf.jobs.some(BT.isOpen)) {
      await new Promise((done) => setTimeout(done, BT.WHAT_IF_POLL_MS));
      for (const job of BT.whatIf.jobs.filter(BT.isOpen)) BT.takeJob(job, await BT.ask(`what-if/${job.id}`));
    }
  } catch (error) {
    BT.fill("what-if-problem", BT.message(error.message));
  } finally {
    BT.whatIf.watching = false;
  }
};

BT.takeJob = (job, found) => {
  if (job.state === found.state && job.ahead === found.ahead) return;
  Object.assign(job, found);
  BT.keepFocus(BT.drawJobs);
};

BT.cancelJob = async (job) => BT.takeJob(job, await BT.ask(`what-if/${job.id}`, "DELETE"));

BT.drawJobs = () => BT.fill("what-if-jobs", BT.whatIf.jobs.map(BT.jobPanel));

BT.jobPanel = (job) =>
  BT.el(
    "div",
    { class: "panel", "data-state": job.state },
    BT.el("h3", {}, job.config),
    BT.el("p", { class: "quiet" }, `${job.subject.label} on ${job.subject.device}: ${BT.jobWords(job)}`),
    BT.isOpen(job) ? BT.button("Cancel", () => BT.cancelJob(job), { "aria-label": `Cancel the compile of ${job.config}` }) : null,
    job.answer ? BT.answerParts(job) : null,
  );

BT.jobWords = (job) => {
  if (job.state === "waiting") return `waits, ${BT.count(job.ahead, "compile")} before it.`;
  if (job.state === "compiling") return "compiles.";
  if (job.state === "cancelled") return "cancelled.";
  return `${job.answer.cached ? "known" : "compiled"} after ${BT.number(job.seconds, 2)} s.`;
};

BT.answerParts = (job) => {
  const { answer } = job;
  if (!answer.resources) return BT.message(`${answer.outcome.replaceAll("_", " ")}: ${answer.error}`);
  const { resources, occupancy } = answer;
  const facts = [
    ["registers", `${BT.number(resources.registers)} per thread`],
    ["spilled", resources.spill_bytes ? `${BT.bytes(resources.spill_bytes)} per thread` : "nothing"],
    ["shared memory", BT.bytes(resources.shared_bytes)],
    ["blocks/SM", `${BT.number(occupancy.blocks_per_sm)}, ${BT.percent(occupancy.occupancy)} occupancy, limited by ${occupancy.limiters.map((name) => BT.LIMIT_WORDS[name]).join(" and ")}`],
    ["predicted", answer.predicted_us === null ? "not predicted" : `${answer.predicted}; ${BT.number(answer.flops / answer.predicted_us / 1e6)} TFLOP/s`],
  ];
  return [
    BT.tableOf(["", ""], facts),
    answer.terms.length ? BT.tableOf(["unit", "alone, predicted"], answer.terms.map(({ term, us }) => [term, BT.us(us)])) : null,
    BT.el("details", {}, BT.el("summary", {}, "Explained by the models"), BT.el("pre", {}, answer.words)),
    BT.el("p", {}, BT.button("Open in the explorer", () => BT.exploreAnswer(job))),
  ];
};

BT.exploreAnswer = ({ answer: { resources } }) => {
  const { registers, shared_bytes, num_warps } = resources;
  BT.explorer = { ...BT.explorer, registers, shared_bytes, num_warps, stages: null, source: null };
  BT.drawExplorer();
  document.getElementById("occupancy").scrollIntoView();
};

BT.onChange((names) => {
  if (!names.includes("sweep")) return;
  if (!document.getElementById("shape-device")) BT.drawShapeForm();
  if (BT.table) BT.subject({ device: BT.table.device, shape: BT.table.shape, label: BT.table.shape_label });
  else if (!BT.whatIf.subject) BT.fill("what-if-form", BT.message("Pick a shape above, or a sweep."));
});
