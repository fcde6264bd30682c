// A shape picked by fields: its sweep is shown where there is one, and its configs can be compiled in any case.
BT.fieldOf = ({ name, help, kind, default: value, needed, choices }) => {
  const id = `shape-${name}`;
  const flag = name.replaceAll("_", "-");
  const words = `${flag}: ${help[0].toLowerCase()}${help.slice(1).replace(/\.$/, "")}`;
  if (choices.length) return BT.selectOf(id, flag, choices.map((choice) => [choice, choice]), value, () => {});
  const type = { int: "number", bool: "checkbox", str: "text" }[kind];
  return BT.el("label", { class: "field", for: id }, words, BT.el("input", { id, type, name, required: needed, checked: value === true, ...(kind === "int" ? { min: 1, step: 1 } : {}) }));
};

BT.flagsOf = () => {
  const flags = {};
  for (const { name, kind } of BT.data.fields) {
    const input = document.getElementById(`shape-${name}`);
    if (kind === "bool") flags[name] = input.checked;
    else if (input.value !== "") flags[name] = kind === "int" ? Number(input.value) : input.value;
  }
  return flags;
};

BT.pickShape = async () => {
  try {
    const found = await BT.ask("shape", "POST", { device: document.getElementById("shape-device").value, flags: BT.flagsOf() });
    BT.fill("shape-answer", found.sweep ? `${found.label} on ${found.device} is shown.` : `${found.label} on ${found.device} was not measured; what if compiles its configs.`);
    if (found.sweep) await BT.showSweep(found.sweep);
    BT.subject(found);
  } catch (error) {
    BT.fill("shape-answer", BT.message(error.message));
  }
};

BT.showSweep = async (headline) => {
  let index = BT.data.sweeps.findIndex((sweep) => sweep.id === headline.id);
  if (index < 0) index = BT.data.sweeps.push(headline) - 1;
  BT.drawChoice(index);
  await BT.chooseSweep(index);
};

BT.drawShapeForm = () => {
  const submit = (event) => {
    event.preventDefault();
    BT.pickShape();
  };
  const devices = BT.data.devices.map((device) => [device.id, device.name]);
  BT.fill(
    "shape-form",
    BT.el("summary", {}, "Pick a shape"),
    BT.el(
      "form",
      { onsubmit: submit, class: "fields" },
      BT.selectOf("shape-device", "GPU", devices, BT.state.gpuA, () => {}),
      BT.data.fields.map(BT.fieldOf),
      BT.el("button", { type: "submit" }, "Show this shape"),
    ),
    BT.el("div", { id: "shape-answer", role: "status" }),
  );
};

document.querySelector("header").append(BT.el("details", { id: "shape-form" }));
