"use strict";
// All plans of a described job: filters, a scatter of time against memory, a table, and the details of one plan.
// Plans are numbered by time, the fastest first; `report/planner.py` packs their columns.

const ROWS = 25, NEAR = 14, MARGIN = { left: 62, right: 14, top: 12, bottom: 34 };

function unpack(text, Type) {
  return new Type(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
}

// Durations, sizes and amounts as the rest of the page writes them.
function timeText(us) {
  if (us < 999.95) return `${us.toFixed(1)} µs`;
  if (us < 999.95e3) return `${(us / 1e3).toFixed(1)} ms`;
  if (us < 599.95e6) return `${(us / 1e6).toFixed(us < 9.995e6 ? 2 : 1)} s`;
  return us < 7200e6 ? `${(us / 60e6).toFixed(1)} min` : `${(us / 3600e6).toFixed(1)} h`;
}
function sizeText(bytes) {
  const place = Math.min(4, Math.max(1, Math.floor(Math.log2(Math.max(bytes, 1)) / 10)));
  return `${(bytes / 1024 ** place).toFixed(1)} ${["B", "KiB", "MiB", "GiB", "TiB"][place]}`;
}
function amountText(value) {
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 4 });
}
const shareText = (share) => `${(share * 100).toFixed(1)} %`;

// An element with attributes and children; names of SVG elements begin with "svg:".
function make(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

class Plans {
  constructor(data) {
    Object.assign(this, data);
    for (const setting of data.settings) setting.column = unpack(setting.column, Uint16Array);
    this.origin = unpack(data.origin, Uint8Array);
    this.named = unpack(data.named, Uint32Array);
    this.step_us = unpack(data.step_us, Float64Array);
    this.intervals = unpack(data.intervals, Float32Array);
    this.peak_bytes = unpack(data.peak_bytes, Float64Array);
    this.fit = unpack(data.fit, Uint8Array);
    this.detail = unpack(data.detail, Uint16Array);
    this.shares = unpack(data.shares, Uint16Array);
    this.memory = unpack(data.memory, Uint16Array);
    this.stage = unpack(data.stage, Uint32Array);
    this.send_us = unpack(data.send_us, Float32Array);
    this.order = unpack(data.order, Uint16Array);
    this.micro_batches = unpack(data.micro_batches, Uint32Array);
    this.words.column = unpack(data.words.column, Uint16Array);
  }

  text(plan) {
    const { phrases, width, column } = this.words;
    return Array.from(column.subarray(plan * width, (plan + 1) * width), (place) => phrases[place]).filter(Boolean).join(", ");
  }

  name(plan) {
    return { [this.best]: "best plan", [this.baseline]: this.unchanged }[plan] ?? "";
  }

  summary(plan) {
    const name = this.name(plan), fit = this.fitting[this.fit[plan]];
    return `${name ? `${name}: ` : ""}${this.text(plan)}; ${timeText(this.step_us[plan])}, ${sizeText(this.peak_bytes[plan])}, ${fit}`;
  }

  // The command that replays a plan; its `--set` line names what differs from the baseline.
  commandOf(plan) {
    const changes = this.settings.flatMap(({ name, values, column }, bit) =>
      this.named[plan] >>> bit & 1 ? [`${name}=${settingText(values[column[plan]])}`] : []);
    return [...this.command, ...(changes.length ? ["--set", changes.join(",")] : [])].join(" ");
  }

  // The parts of a plan's step above nothing; null: they were not computed.
  partsOf(plan) {
    const row = this.detail[plan], width = this.parts.length;
    if (!row) return null;
    return this.parts.map(([, name, look], place) => ({ name, look, share: this.shares[(row - 1) * width + place] / 65535 })).filter((part) => part.share > 0);
  }

  memoryOf(plan) {
    const width = this.purposes.length;
    return this.purposes.map(([name, look], place) => ({ name, look, share: this.memory[plan * width + place] / 65535 })).filter((part) => part.share > 0);
  }
}

// A value as `--set` takes it, and as a filter shows it.
function settingText(value) {
  if (Array.isArray(value)) return value.join(",") || "even";
  return typeof value === "boolean" ? String(Number(value)) : String(value);
}
function valueText(value) {
  if (value === null) return "the framework's";
  return typeof value === "boolean" ? (value ? "yes" : "no") : String(value);
}

// Filters: a plan is shown if it passes all of them.

class Filters {
  constructor(plans, form, onChange) {
    Object.assign(this, { plans, form, onChange, tests: [] });
    const { settings } = plans;
    this.slider("step time at most", plans.step_us, timeText);
    this.slider("peak memory at most", plans.peak_bytes, sizeText);
    this.chips("memory", "", plans.fitting, plans.fit);
    this.chips("chosen", "How a plan was chosen to be priced", plans.origins, plans.origin);
    for (const { label, note, values, column } of settings) {
      if (Array.isArray(values[0])) this.chips(label, note, ["even", "uneven"], column.map((place) => Number(values[place].length > 0)));
      else if (values.length <= 10) this.chips(label, note, values.map(valueText), column);
      else this.slider(`${label} at most`, column, (place) => valueText(values[Math.round(place)]), true);
    }
    form.addEventListener("input", () => this.apply());
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  // Values to choose from; if none is chosen all are shown.
  chips(label, note, names, column) {
    const present = new Set(column);
    if (present.size < 2) return;
    const boxes = names.map(() => make("input", { type: "checkbox" }));
    const chips = boxes.map((box, place) => make("label", { class: "chip" }, box, make("span", {}, names[place])));
    const group = make("fieldset", note ? { "data-tip": note } : {}, make("legend", {}, label), make("div", { class: "chips" }, ...chips.filter((_, place) => present.has(place))));
    this.form.append(group);
    this.tests.push(() => {
      const some = boxes.some((box) => box.checked);
      return some ? (plan) => boxes[column[plan]].checked : null;
    });
  }

  // An upper limit, on a logarithmic scale unless the values are places in a list.
  slider(label, column, text, even = false) {
    const sorted = Float64Array.from(column).sort(), low = sorted[0], high = sorted[sorted.length - 1];
    if (!(low < high)) return;
    const most = even ? high - low : 1000;
    const input = make("input", { type: "range", "aria-label": label, min: 0, max: most, step: 1, value: most });
    const output = make("output", { "aria-hidden": "true" }); // `aria-valuetext` says it
    const limit = () => {
      const share = Number(input.value) / most;
      if (share === 1) return high;
      return even || low <= 0 ? low + (high - low) * share : low * (high / low) ** share;
    };
    const show = () => {
      output.textContent = text(limit());
      input.setAttribute("aria-valuetext", output.textContent);
    };
    this.form.append(make("label", { class: "slider" }, make("span", {}, label), output, input));
    show();
    this.tests.push(() => {
      show();
      const value = limit();
      return value < high ? (plan) => column[plan] <= value * (1 + 1e-12) : null;
    });
  }

  apply() {
    const tests = this.tests.map((test) => test()).filter(Boolean), shown = [];
    for (let plan = 0; plan < this.plans.count; plan++) if (tests.every((test) => test(plan))) shown.push(plan);
    this.onChange(shown);
  }

  clear() {
    for (const input of this.form.querySelectorAll("input")) {
      if (input.type === "range") input.value = input.max;
      else input.checked = false;
    }
    this.apply();
  }
}

// The chart. Both axes are logarithmic where values differ by more than a factor of four.

function axis(values, from, to) {
  let low = Math.min(...values), high = Math.max(...values);
  const logarithmic = low > 0 && high / low > 4;
  const turn = logarithmic ? Math.log : (value) => value;
  const margin = (turn(high) - turn(low)) * 0.05 || Math.abs(turn(high)) * 0.05 || 1;
  const first = turn(low) - margin, last = turn(high) + margin;
  return { at: (value) => from + ((turn(value) - first) / (last - first)) * (to - from), low, high, logarithmic };
}

function tickValues({ low, high, logarithmic }, unit) {
  if (!logarithmic) {
    const step = niceStep((high - low) / unit || 1, 5);
    return Array.from({ length: 12 }, (_, place) => (Math.ceil(low / unit / step) + place) * step * unit).filter((value) => value <= high);
  }
  const values = [];
  for (let power = 10 ** Math.floor(Math.log10(low / unit)); power * unit <= high; power *= 10) {
    for (const factor of high / low > 100 ? [1, 3] : [1, 2, 5]) if (factor * power * unit >= low && factor * power * unit <= high) values.push(factor * power * unit);
  }
  return values;
}

class Scatter {
  constructor(plans, canvas, onChoose) {
    Object.assign(this, { plans, canvas, onChoose, shown: [], byMemory: [], focus: -1, chosen: -1 });
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => showTip(""));
    canvas.addEventListener("click", (event) => {
      const plan = this.near(event);
      if (plan >= 0) this.choose(plan);
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.later());
    canvas.addEventListener("focus", () => this.later());
    new ResizeObserver(() => this.later()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.later());
  }

  show(shown) {
    const { peak_bytes } = this.plans;
    this.shown = shown;
    this.byMemory = [...shown].sort((a, b) => peak_bytes[a] - peak_bytes[b] || a - b);
    if (!shown.includes(this.focus)) this.focus = shown[0] ?? -1;
    this.later();
  }

  later() {
    if (this.requested) return;
    this.requested = true;
    requestAnimationFrame(() => {
      this.requested = false;
      this.draw();
    });
  }

  draw() {
    const { canvas, plans } = this, ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    this.places = [];
    if (!this.shown.length) {
      context.fillStyle = colour("ink-3");
      context.fillText("No plan passes the filters.", MARGIN.left, height / 2);
      return;
    }
    const { left, right, top, bottom } = MARGIN, limit = plans.limit_bytes;
    const memories = this.shown.map((plan) => plans.peak_bytes[plan]), times = this.shown.map((plan) => plans.step_us[plan]);
    const x = axis(limit ? [...memories, limit] : memories, left, width - right), y = axis(times, height - bottom, top);
    this.drawAxes(context, colour, x, y, width, height);
    for (const plan of [...this.shown].reverse()) {
      const place = { plan, x: x.at(plans.peak_bytes[plan]), y: y.at(plans.step_us[plan]) };
      this.places.push(place);
      this.mark(context, colour, place);
    }
    for (const place of this.places) this.drawRing(context, colour, place);
  }

  drawAxes(context, colour, x, y, width, height) {
    const { left, right, top, bottom } = MARGIN;
    const time = y.high >= 1e6 ? [1e6, "s"] : y.high >= 1e3 ? [1e3, "ms"] : [1, "µs"];
    const size = x.low >= 2 ** 40 ? [2 ** 40, "TiB"] : x.high >= 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"];
    context.strokeStyle = colour("line");
    context.fillStyle = colour("ink-3");
    context.textAlign = "right";
    for (const value of tickValues(y, time[0])) {
      const at = Math.round(y.at(value)) + 0.5;
      context.strokeRect(left, at, width - left - right, 0);
      context.fillText(amountText(value / time[0]), left - 6, at + 4);
    }
    context.textAlign = "center";
    let written = -Infinity;
    for (const value of tickValues(x, size[0])) {
      const at = Math.round(x.at(value)) + 0.5;
      context.strokeRect(at, top, 0, height - top - bottom);
      if (at - written < 34) continue;
      context.fillText(amountText(value / size[0]), at, height - bottom + 14);
      written = at;
    }
    context.textAlign = "right";
    context.fillText(`peak memory, ${size[1]}`, width - right, height - 6);
    context.textAlign = "left";
    context.fillText(`step, ${time[1]}`, 6, height - 6);
    const { limit_bytes, searched_bytes } = this.plans;
    const limits = [["device", limit_bytes], ...(searched_bytes !== limit_bytes ? [["search", searched_bytes]] : [])];
    limits.forEach(([name, bytes], row) => {
      if (!bytes) return;
      const at = Math.round(x.at(bytes)) + 0.5;
      context.strokeStyle = context.fillStyle = colour("open");
      context.setLineDash(row ? [2, 4] : [6, 3]);
      context.beginPath();
      context.moveTo(at, top);
      context.lineTo(at, height - bottom);
      context.stroke();
      context.setLineDash([]);
      const before = row || at > width / 2;
      context.textAlign = before ? "right" : "left";
      context.fillText(`${name} ${sizeText(bytes)}`, at + (before ? -5 : 5), top + 10 + 14 * row);
    });
    context.textAlign = "left";
  }

  // A mark tells by its shape what its colour tells.
  mark(context, colour, { plan, x, y }) {
    const { plans } = this;
    context.beginPath();
    if (plan === plans.best || plan === plans.baseline) {
      const corners = plan === plans.best ? [[0, -8], [7, 5], [-7, 5]] : [[0, -7], [7, 0], [0, 7], [-7, 0]];
      corners.forEach(([dx, dy], corner) => context[corner ? "lineTo" : "moveTo"](x + dx, y + dy));
      context.closePath();
      context.fillStyle = colour(plan === plans.best ? "good" : "backward");
      context.strokeStyle = colour("card");
      context.lineWidth = 1.5;
      context.fill();
      context.stroke();
    } else if (plans.fit[plan]) {
      context.arc(x, y, plans.fit[plan] > 1 ? 3.5 : 3, 0, 2 * Math.PI);
      context.globalAlpha = 0.7;
      context.fillStyle = context.strokeStyle = colour("compute");
      context.lineWidth = 1.5;
      if (plans.fit[plan] > 1) context.fill();
      else context.stroke();
      context.globalAlpha = 1;
    } else {
      context.moveTo(x - 3, y - 3);
      context.lineTo(x + 3, y + 3);
      context.moveTo(x + 3, y - 3);
      context.lineTo(x - 3, y + 3);
      context.globalAlpha = 0.75;
      context.strokeStyle = colour("open");
      context.lineWidth = 1.2;
      context.stroke();
      context.globalAlpha = 1;
    }
    context.lineWidth = 1;
  }

  drawRing(context, colour, { plan, x, y }) {
    const focused = plan === this.focus && document.activeElement === this.canvas;
    if (plan !== this.chosen && !focused) return;
    context.beginPath();
    context.arc(x, y, 10, 0, 2 * Math.PI);
    context.strokeStyle = colour(focused ? "accent" : "ink");
    context.lineWidth = 2;
    context.setLineDash(focused ? [3, 2] : []);
    context.stroke();
    context.setLineDash([]);
    context.lineWidth = 1;
  }

  near(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = -1, least = NEAR ** 2;
    for (const place of this.places ?? []) {
      const distance = (place.x - x) ** 2 + (place.y - y) ** 2;
      if (distance <= least) [best, least] = [place.plan, distance];
    }
    return best;
  }

  point(event) {
    const plan = this.near(event);
    showTip(plan < 0 ? "" : this.plans.summary(plan), event.clientX, event.clientY);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.shown.length) return;
    const step = (order, by) => order[Math.min(order.length - 1, Math.max(0, order.indexOf(this.focus) + by))];
    const moves = {
      ArrowRight: () => step(this.byMemory, 1),
      ArrowLeft: () => step(this.byMemory, -1),
      ArrowUp: () => step(this.shown, 1),
      ArrowDown: () => step(this.shown, -1),
      Home: () => this.shown[0],
      End: () => this.shown[this.shown.length - 1],
    };
    if (event.key === "Enter" || event.key === " ") this.choose(this.focus);
    else if (event.key in moves) {
      this.focus = moves[event.key]();
      byId("planner-focus").textContent = this.plans.summary(this.focus);
      this.later();
    } else return;
    event.preventDefault();
  }

  choose(plan) {
    this.focus = plan;
    this.onChoose(plan);
  }
}

// The pipeline of a plan, from the order of its passes and how long they take.

function replayed(orders, schedule, durations, send_us) {
  const ranks = orders.length, twice = schedule === "dual-pipe";
  const folded = twice || ["zero-bubble-v", "dual-pipe-v"].includes(schedule), last = durations.length - 1;
  const stageOf = (rank, chunk) => folded ? (chunk ? 2 * ranks - 1 - rank : rank) : chunk * ranks + rank;
  const rankOf = (stage) => folded ? Math.min(stage, 2 * ranks - 1 - stage) : stage % ranks;
  const isFirst = (stage) => stage === 0 || (twice && stage === ranks), isLast = (stage) => stage === last || (twice && stage === ranks - 1);
  const ends = { F: durations.map(() => []), I: durations.map(() => []) }, starts = durations.map(() => ({ F: 0, I: 0, W: 0 }));
  const sent = (from, to) => rankOf(from) === rankOf(to) ? 0 : send_us;
  const inputAt = (way, stage, number) => {
    if (way === "W") return ends.I[stage][number];
    if (way === "F") return isFirst(stage) ? 0 : ends.F[stage - 1][number] + sent(stage - 1, stage);
    return isLast(stage) ? ends.F[stage][number] : ends.I[stage + 1][number] + sent(stage + 1, stage);
  };
  const places = orders.map(() => 0), free = orders.map(() => 0), spans = orders.map(() => ({ forward: [], backward: [], weights: [] }));
  for (let moved = true; moved;) {
    moved = false;
    orders.forEach((order, rank) => {
      for (; places[rank] < order.length; places[rank]++, moved = true) {
        const code = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789".indexOf(order[places[rank]]);
        const direction = "FBIW"[code % 4], way = direction === "B" ? "I" : direction, stage = stageOf(rank, code >> 2);
        const at = inputAt(way, stage, starts[stage][way]);
        if (at === undefined || Number.isNaN(at)) break;
        const [, forward, backward, weights] = durations[stage], start = Math.max(free[rank], at);
        free[rank] = start + { F: forward, B: backward, I: backward - weights, W: weights }[direction];
        starts[stage][way]++;
        if (direction === "B") starts[stage].W++;
        if (way !== "W") ends[way][stage].push(free[rank]);
        spans[rank][{ F: "forward", W: "weights" }[direction] ?? "backward"].push([start, free[rank]]);
      }
    });
  }
  return { spans, end: Math.max(...free), whole: places.every((place, rank) => place === orders[rank].length) };
}

// The card of the chosen plan.

class Card {
  constructor(plans, region) {
    Object.assign(this, { plans, region });
  }

  show(plan) {
    const { plans, region } = this, name = plans.name(plan);
    const others = [plans.best, plans.baseline].filter((other) => other !== null && other !== plan);
    region.replaceChildren(
      make("h3", { id: "planner-plan-title", tabindex: "-1" }, `${name ? `${name[0].toUpperCase()}${name.slice(1)}: ` : "Chosen plan: "}${plans.text(plan)}`),
      this.tiles(plan),
      this.commandLine(plan),
      ...this.parts([plan, ...others]),
      ...this.ledger([plan, ...others]),
      ...this.pipeline(plan),
    );
  }

  tiles(plan) {
    const { plans } = this, us = plans.step_us[plan], [low, high] = plans.intervals.subarray(2 * plan, 2 * plan + 2);
    const free = plans.limit_bytes ? plans.limit_bytes - plans.peak_bytes[plan] : null, base = plans.baseline;
    const rows = [["Step", timeText(us), `${timeText(low * us)} to ${timeText(high * us)}`]];
    if (base !== null && base !== plan) rows.push(["Speed-up", `${(plans.step_us[base] / us).toFixed(2)}×`, `over ${plans.unchanged}`]);
    if (plans.tokens) rows.push(["Tokens a second", amountText(plans.tokens / us * 1e6), ""]);
    if (plans.flops_us) rows.push(["MFU", shareText(plans.flops_us / us), "of the device's peak"]);
    if (plans.usd_per_us && plans.tokens) rows.push(["Price", `$${(plans.usd_per_us * us / plans.tokens * 1e6).toPrecision(3)}`, "a million tokens"]);
    const left = free === null ? "the device's memory is not known" : `${sizeText(Math.abs(free))} ${free < 0 ? "too much" : "free"}`;
    rows.push(["Memory", sizeText(plans.peak_bytes[plan]), `${plans.fitting[plans.fit[plan]]}: ${left}`]);
    return make("dl", { class: "tiles" }, ...rows.map(([title, value, below]) =>
      make("div", { class: "tile" }, make("dt", {}, title), make("dd", {}, make("strong", {}, value), make("span", {}, below)))));
  }

  commandLine(plan) {
    const code = make("code", { id: "planner-command" }, this.plans.commandOf(plan));
    const button = make("button", { type: "button", id: "planner-copy", "aria-describedby": "planner-command" }, "Copy the command");
    const said = make("span", { class: "quiet", role: "status" });
    button.addEventListener("click", async () => {
      said.textContent = await copied(code) ? "Copied." : "Not allowed here: the command is selected, copy it with Ctrl + C.";
    });
    return make("div", { class: "command" }, code, button, said);
  }

  // Bars of parts on one scale, a legend and a table of the first plan's numbers. `rows`: [name, value in words, parts with sizes].
  stacked(title, rows, text) {
    const longest = Math.max(...rows.map(([, , parts]) => parts.reduce((sum, part) => sum + part.size, 0)));
    const present = new Map(rows.flatMap(([, , parts]) => parts.map(({ look, name }) => [name, look])));
    const looks = new Map();
    for (const [name, look] of present) looks.set(look, [...(looks.get(look) ?? []), name]);
    const legend = [...looks].map(([look, names]) => make("li", {}, make("span", { class: `swatch part ${look}`, "aria-hidden": "true" }), names.join(", ")));
    const bars = rows.map(([name, value, parts]) => {
      let x = 0;
      const svg = make("svg:svg", { class: "bar", width: "100%", height: 22, role: "img", "aria-label": `${name}: ${value}` });
      for (const part of parts) {
        const width = part.size / longest * 100;
        svg.append(make("svg:rect", { x: `${x}%`, y: 0, width: `${width}%`, height: 22, class: `part ${part.look}${width < 0.5 ? " narrow" : ""}`, "data-tip": `${part.name}: ${text(part)}` }));
        x += width;
      }
      return make("li", {}, make("div", { class: "row" }, make("span", { class: "name" }, name), make("span", { class: "value" }, value)), svg);
    });
    const body = rows[0][2].map((part) => make("tr", {}, make("th", { scope: "row" }, part.name), make("td", { class: "number" }, text(part))));
    const numbers = make("details", {}, make("summary", {}, "Numbers of this plan"), make("table", {}, make("caption", {}, title), make("tbody", {}, ...body)));
    return [make("h4", {}, title), make("ul", { class: "legend" }, ...legend), make("ul", { class: "rows", "aria-label": title }, ...bars), numbers];
  }

  called(plan, place) {
    return place ? this.plans.name(plan) : "this plan";
  }

  parts(chosen) {
    const { plans } = this;
    if (!plans.partsOf(chosen[0])) {
      return [make("h4", {}, "Where a step goes"), make("p", { class: "quiet" }, `It is computed for the ${plans.most_detailed} fastest plans that fit; the command above tells that of this one.`)];
    }
    const rows = chosen.map((plan, place) => {
      const us = plans.step_us[plan];
      return [this.called(plan, place), timeText(us), (plans.partsOf(plan) ?? []).map((part) => ({ ...part, size: part.share * us }))];
    });
    return this.stacked("Where a step goes", rows, (part) => `${timeText(part.size)} (${shareText(part.share)})`);
  }

  ledger(chosen) {
    const { plans } = this, limit = plans.limit_bytes;
    const rows = chosen.map((plan, place) => {
      const peak = plans.peak_bytes[plan], parts = plans.memoryOf(plan).map((part) => ({ ...part, size: part.share * peak }));
      if (limit > peak) parts.push({ name: "free", look: "idle", size: limit - peak });
      return [this.called(plan, place), `${sizeText(peak)}${limit ? ` of ${sizeText(limit)}` : ""}`, parts];
    });
    return this.stacked("Memory of the rank that needs most", rows, (part) => sizeText(part.size));
  }

  pipeline(plan) {
    const { plans } = this, title = make("h4", {}, "The pipeline"), number = plans.order[plan];
    const durations = plans.stages[plans.stage[plan]].flatMap((equal) => Array(equal[0]).fill(equal));
    if (durations.length === 1) return [title, make("p", { class: "quiet" }, "One stage: there is no pipeline.")];
    if (!number) return [title, make("p", { class: "quiet" }, "The order of its passes is not in this page; the command above with --perfetto FILE writes its timeline.")];
    const { schedule, micro_batches, orders } = plans.pipelines[number - 1];
    const { spans, end } = replayed(orders, schedule, durations, plans.send_us[plan]);
    const all = plans.micro_batches[plan], every = Math.ceil(spans.length / 16);
    const looks = { forward: "forward", backward: "backward", weights: "update" };
    const rows = spans.flatMap((kinds, rank) => {
      if (rank % every) return [];
      const busy = Object.values(kinds).flat().reduce((sum, [from, to]) => sum + to - from, 0) / end, value = `busy ${shareText(busy)}`;
      const svg = make("svg:svg", { class: "bar", width: "100%", height: 14, viewBox: "0 0 10000 1", preserveAspectRatio: "none", role: "img", "aria-label": `rank ${rank}: ${value}` }, make("svg:rect", { x: 0, y: 0, width: 10000, height: 1, class: "idle" }));
      for (const [kind, some] of Object.entries(kinds)) {
        const d = some.map(([from, to]) => {
          const x = Math.round(from / end * 1e4), width = Math.max(1, Math.round(to / end * 1e4) - x - 4);
          return `M${x} 0h${width}v1h-${width}z`;
        }).join("");
        if (d) svg.append(make("svg:path", { d, class: looks[kind] }));
      }
      return [make("li", {}, make("div", { class: "row" }, make("span", { class: "name" }, `pipeline rank ${rank}`), make("span", { class: "value" }, value)), svg)];
    });
    const some = micro_batches < all ? `The first and last of ${all} micro-batches: ${micro_batches} are drawn, so that the idle time looks longer than it is.` : `All ${all} micro-batches.`;
    const names = [["forward", "forward"], ["backward", "backward"], ...(spans.some((kinds) => kinds.weights.length) ? [["update", "gradients of weights"]] : []), ["idle", "idle"]];
    return [
      title,
      make("p", { class: "quiet" }, `${some} Exchanges of parameters and gradients and the optimizer are left out.${every > 1 ? ` Every ${every}th rank is drawn.` : ""}`),
      make("ul", { class: "legend" }, ...names.map(([look, name]) => make("li", {}, make("span", { class: `swatch part ${look}`, "aria-hidden": "true" }), name))),
      make("ul", { class: "rows pipeline", "aria-label": "Pipeline of this plan" }, ...rows),
    ];
  }
}

async function copied(element) {
  getSelection().selectAllChildren(element);
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    return document.execCommand("copy");
  }
}

// The table, a part of its rows at a time.

class PlanTable {
  constructor(plans, region, more, onChoose) {
    Object.assign(this, { plans, region, more, onChoose, rows: ROWS, shown: [], chosen: -1 });
    more.addEventListener("click", () => {
      this.rows += 4 * ROWS;
      this.draw();
    });
  }

  show(shown) {
    this.rows = ROWS;
    this.shown = [true, false].flatMap((fits) => shown.filter((plan) => Boolean(this.plans.fit[plan]) === fits));
    this.draw();
  }

  draw() {
    const { plans } = this, columns = ["plan", "step", "than the best", "peak memory", "fit", "chosen"], numbers = [1, 2, 3];
    const best = plans.best ?? plans.baseline ?? 0;
    const head = make("tr", {}, ...columns.map((name, place) => make("th", { scope: "col", ...(numbers.includes(place) ? { class: "number" } : {}) }, name)));
    const body = this.shown.slice(0, this.rows).map((plan) => {
      const button = make("button", { type: "button" }, plans.name(plan) ? `${plans.text(plan)} (${plans.name(plan)})` : plans.text(plan));
      button.addEventListener("click", () => this.onChoose(plan));
      const slower = plans.step_us[plan] / plans.step_us[best] - 1;
      const cells = [timeText(plans.step_us[plan]), `${slower < 0 ? "−" : "+"}${shareText(Math.abs(slower))}`, sizeText(plans.peak_bytes[plan]), plans.fitting[plans.fit[plan]], plans.origins[plans.origin[plan]]];
      return make("tr", plan === this.chosen ? { "aria-current": "true" } : {}, make("th", { scope: "row" }, button),
        ...cells.map((text, place) => make("td", { "data-label": columns[place + 1], ...(numbers.includes(place + 1) ? { class: "number" } : {}) }, text)));
    });
    this.region.replaceChildren(make("table", {}, make("caption", {}, "Plans by time, those that fit first"), make("thead", {}, head), make("tbody", {}, ...body)));
    this.more.hidden = this.shown.length <= this.rows;
  }
}

const planner = byId("planner-data");
if (planner) {
  const plans = new Plans(JSON.parse(planner.textContent));
  const card = new Card(plans, byId("planner-plan"));
  const choose = (plan, moveFocus = false) => {
    scatter.chosen = list.chosen = plan;
    card.show(plan);
    scatter.later();
    list.draw();
    byId("planner-focus").textContent = `Chosen: ${plans.summary(plan)}`;
    if (moveFocus) byId("planner-plan-title").focus();
  };
  const scatter = new Scatter(plans, byId("planner-canvas"), choose);
  const list = new PlanTable(plans, byId("planner-table"), byId("planner-more"), (plan) => choose(plan, true));
  const filters = new Filters(plans, byId("planner-filters"), (shown) => {
    const fit = shown.filter((plan) => plans.fit[plan] === 2);
    byId("planner-count").textContent = `${shown.length} of ${plans.count} plans, of which ${fit.length} fit.`;
    byId("planner-caption").textContent = `Step time against peak memory of ${shown.length} plans${fit.length ? `. The fastest that fits: ${plans.summary(fit[0])}` : ""}.`;
    scatter.show(shown);
    list.show(shown);
  });
  byId("planner-reset").addEventListener("click", () => filters.clear());
  byId("planner-baseline").textContent = plans.unchanged;
  byId("planner-static").hidden = true;
  byId("planner-app").hidden = false;
  if (matchMedia("(max-width: 40rem)").matches) document.querySelector(".filters").open = false;
  filters.apply();
  choose(plans.best ?? plans.baseline ?? 0);
  byId("planner-focus").textContent = "";
  byId("planner-canvas").planner = { plans, scatter, filters, choose };
}
