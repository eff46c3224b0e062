"use strict";
// The timeline on its canvas, and the tooltips of charts. Everything else on the page works without this script.

const byId = (id) => document.getElementById(id);

// A duration with the unit that suits it.
function duration(us) {
  if (Math.abs(us) < 1e3) return `${us.toFixed(1)} µs`;
  return Math.abs(us) < 1e6 ? `${(us / 1e3).toFixed(us < 1e4 ? 2 : 1)} ms` : `${(us / 1e6).toFixed(2)} s`;
}

function showTip(text, x, y) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.max(6, Math.min(x + 14, document.documentElement.clientWidth - width - 6));
  const top = y + 18 + height > document.documentElement.clientHeight ? y - height - 10 : y + 18;
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(6, top)}px`;
}

document.addEventListener("pointermove", (event) => {
  if (event.target.id === "timeline-canvas") return;
  const marked = event.target.closest?.("[data-tip]");
  showTip(marked?.getAttribute("data-tip"), event.clientX, event.clientY);
});
document.addEventListener("scroll", () => showTip(""), { passive: true });

const ROW = 13, GAP = 8, MOST_ROWS = 6, AXIS = 24, LABELS = 118, NARROW_LABELS = 92, NARROW = 520;

// Slices of a lane that overlap go to rows of their own; what needs more than MOST_ROWS is counted as hidden.
function layOut(lane) {
  const ends = [];
  lane.rows = [];
  lane.hidden = 0;
  for (let i = 0; i < lane.start.length; i++) {
    const from = lane.start[i];
    let row = 0;
    while (row < ends.length && ends[row] > from) row++;
    if (row === MOST_ROWS) {
      lane.hidden++;
      continue;
    }
    if (row === ends.length) lane.rows.push([]);
    ends[row] = from + lane.length[i];
    lane.rows[row].push(i);
  }
}

// The first slice of a row (in order of time, none overlap) that ends after `time`.
function firstAfter(lane, row, time) {
  let low = 0, high = row.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.start[row[middle]] + lane.length[row[middle]] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

function niceStep(span, wanted) {
  const power = 10 ** Math.floor(Math.log10(span / wanted));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => span / step <= wanted);
}

class Timeline {
  constructor(canvas, data) {
    this.canvas = canvas;
    this.data = data;
    data.lanes.forEach(layOut);
    this.end = Math.max(1, ...data.lanes.map((lane) => lane.start.reduce((last, from, i) => Math.max(last, from + lane.length[i]), 0)));
    this.from = 0;
    this.span = this.end;
    this.pointers = new Map();
    this.listen();
    this.choose(byId("timeline-rank").value);
  }

  choose(rank) {
    this.lanes = this.data.lanes.filter((lane) => rank === "" || lane.rank === Number(rank));
    this.lanes.sort((a, b) => a.rank - b.rank || a.measured - b.measured);
    let y = AXIS;
    this.places = [];
    let group = null;
    for (const lane of this.lanes) {
      const key = `${lane.measured ? "Measured" : "Predicted"}, rank ${lane.rank}`;
      if (key !== group) {
        this.places.push({ title: key, y: y + GAP });
        y += GAP + 18;
        group = key;
      }
      this.places.push({ lane, y });
      y += Math.max(1, lane.rows.length) * ROW + 4;
    }
    this.height = y + GAP;
    this.canvas.style.height = `${this.height}px`;
    this.resize();
  }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.labels = this.width < NARROW ? NARROW_LABELS : LABELS;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.ratio = ratio;
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
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const context = this.canvas.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    this.drawAxis(context, colour);
    const colours = this.data.kinds.map(colour);
    for (const place of this.places) {
      if (place.title) {
        context.fillStyle = colour("ink-2");
        context.font = "600 11px system-ui, sans-serif";
        context.fillText(place.title, 6, place.y + 8);
        context.font = "11px system-ui, sans-serif";
        continue;
      }
      this.drawLane(context, place, colours, colour("card"));
      context.fillStyle = colour("ink-3");
      const more = place.lane.hidden ? ` +${place.lane.hidden}` : "";
      this.label(context, place.lane.name + more, place.y + ROW / 2);
    }
  }

  drawAxis(context, colour) {
    const span_us = this.span * this.data.unit_us, from_us = this.from * this.data.unit_us;
    const step = niceStep(span_us, Math.max(3, (this.width - this.labels) / 80));
    context.strokeStyle = colour("line");
    context.fillStyle = colour("ink-3");
    context.lineWidth = 1;
    context.beginPath();
    for (let number = Math.ceil(from_us / step); number * step <= from_us + span_us; number++) {
      const x = Math.round(this.labels + ((number * step - from_us) / span_us) * (this.width - this.labels)) + 0.5;
      context.moveTo(x, AXIS - 6);
      context.lineTo(x, this.height);
      if (x < this.width - 46) context.fillText(this.tick(number * step, step), x + 3, 10);
    }
    context.stroke();
  }

  tick(us, step) {
    const last = (this.from + this.span) * this.data.unit_us;
    const [unit, name] = last >= 1e6 && step >= 1e4 ? [1e6, "s"] : step >= 1e3 || us >= 1e5 ? [1e3, "ms"] : [1, "µs"];
    return `${(us / unit).toFixed(Math.max(0, Math.ceil(-Math.log10(step / unit))))} ${name}`;
  }

  // A name that is too long loses its middle: numbers at its end tell lanes apart.
  label(context, text, y) {
    const end = text.slice(-Math.max(2, text.length - text.search(/ \S+( \+\d+)?$/)));
    let short = text, head = text.length - end.length;
    while (head > 1 && context.measureText(short).width > this.labels - 12) short = text.slice(0, --head) + "…" + end;
    context.fillText(short, 6, y);
  }

  drawLane(context, { lane, y }, colours, edge) {
    const scale = (this.width - this.labels) / this.span, until = this.from + this.span;
    context.save();
    context.beginPath();
    context.rect(this.labels, y, this.width - this.labels, lane.rows.length * ROW);
    context.clip();
    lane.rows.forEach((row, number) => {
      const top = y + number * ROW;
      let drawn = -1;
      for (let place = firstAfter(lane, row, this.from); place < row.length; place++) {
        const i = row[place];
        if (lane.start[i] > until) break;
        const left = this.labels + (lane.start[i] - this.from) * scale, width = lane.length[i] * scale;
        if (left + width < drawn) continue; // within a pixel that is coloured already
        const shown = Math.max(width, 1);
        context.fillStyle = colours[lane.kind[i]];
        context.fillRect(left, top + 1, shown, ROW - 2);
        if (width > 4) {
          context.fillStyle = edge;
          context.fillRect(left + width - 0.75, top + 1, 0.75, ROW - 2);
        }
        drawn = Math.max(drawn, Math.floor(left + shown));
      }
    });
    context.restore();
  }

  // The slice under a point, or the closest one within two pixels.
  at(x, y) {
    const place = this.places.find(({ lane, y: top }) => lane && y >= top && y < top + lane.rows.length * ROW);
    if (!place || x < this.labels) return null;
    const lane = place.lane, row = lane.rows[Math.floor((y - place.y) / ROW)];
    const perPixel = this.span / (this.width - this.labels);
    const time = this.from + (x - this.labels) * perPixel;
    const found = firstAfter(lane, row, time - 2 * perPixel);
    if (found === row.length || lane.start[row[found]] > time + 2 * perPixel) return null;
    let best = row[found];
    for (let next = found; next < row.length && lane.start[row[next]] <= time; next++) best = row[next];
    return { lane, i: best };
  }

  tell(event) {
    const box = this.canvas.getBoundingClientRect();
    const hit = this.at(event.clientX - box.left, event.clientY - box.top);
    if (!hit) return showTip("");
    const { lane, i } = hit, unit = this.data.unit_us;
    const text = this.data.names[lane.text[i]];
    const words = `${text} · ${this.data.kinds[lane.kind[i]]}, ${duration(lane.length[i] * unit)} from ${duration(lane.start[i] * unit)}`;
    showTip(words, event.clientX, event.clientY);
  }

  // Keep the time at pixel x where it is, and show `factor` times as much.
  zoom(factor, x = this.labels + (this.width - this.labels) / 2) {
    const share = Math.min(1, Math.max(0, (x - this.labels) / (this.width - this.labels)));
    const span = Math.min(this.end, Math.max(20, this.span * factor));
    this.from += (this.span - span) * share;
    this.span = span;
    this.move(0);
  }

  move(by) {
    this.from = Math.min(this.end - this.span, Math.max(0, this.from + by));
    this.later();
  }

  all() {
    this.from = 0;
    this.span = this.end;
    this.later();
  }

  act(name) {
    if (name === "in") this.zoom(0.5);
    else if (name === "out") this.zoom(2);
    else if (name === "left") this.move(-this.span / 4);
    else if (name === "right") this.move(this.span / 4);
    else this.all();
  }

  listen() {
    const { canvas, pointers } = this;
    const perPixel = () => this.span / (this.width - this.labels);
    canvas.addEventListener("wheel", (event) => {
      const x = event.clientX - canvas.getBoundingClientRect().left;
      if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(Math.max(-100, Math.min(100, event.deltaY)) / 150), x);
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move((event.deltaX || event.deltaY) * perPixel());
      else return; // the page scrolls
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, event.clientX);
      canvas.classList.add("moving");
      this.tell(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (before === undefined) return this.tell(event);
      if (pointers.size === 2) {
        const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
        const factor = Math.max(8, Math.abs(before - other)) / Math.max(8, Math.abs(event.clientX - other));
        this.zoom(factor, other - canvas.getBoundingClientRect().left);
      } else {
        this.move((before - event.clientX) * perPixel());
      }
      if (event.clientX !== before) showTip("");
      pointers.set(event.pointerId, event.clientX);
    });
    const release = (event) => {
      pointers.delete(event.pointerId);
      if (!pointers.size) canvas.classList.remove("moving");
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => showTip(""));
    canvas.addEventListener("dblclick", () => this.all());
    const keys = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", Home: "all", 0: "all" };
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
      this.act(keys[event.key]);
      event.preventDefault();
    });
    document.querySelectorAll("[data-act]").forEach((button) => button.addEventListener("click", () => this.act(button.dataset.act)));
    byId("timeline-rank").addEventListener("change", (event) => this.choose(event.target.value));
    new ResizeObserver(() => this.resize()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.later());
  }
}

const canvas = byId("timeline-canvas");
if (canvas) {
  const data = JSON.parse(byId("timeline-data").textContent);
  const shown = new Timeline(canvas, data);
  const hidden = data.lanes.reduce((sum, lane) => sum + lane.hidden, 0);
  const notes = [];
  if (data.left_out) notes.push(`The ${data.left_out.toLocaleString("en")} shortest ops are left out.`);
  if (hidden) notes.push(`${hidden.toLocaleString("en")} ops nested deeper than ${MOST_ROWS} rows are not drawn.`);
  byId("timeline-left-out").textContent = notes.join(" ");
  byId("timeline-left-out").hidden = !notes.length;
  canvas.dataset.slices = String(data.lanes.reduce((sum, lane) => sum + lane.start.length - lane.hidden, 0));
  canvas.timeline = shown;
}
