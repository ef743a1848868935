// Who held which GPU over the last hours: a row for each GPU, a bar for each lease, a colour for each owner. Only the rows
// that are seen are in the document.

import { byId, el, svg, text } from "./dom.js";
import { nowMs } from "./now.js";
import { clock, details, duration, END_REASONS, gpuName, gpuOfBox, holderName, parseTime } from "./words.js";

const ROW = 22;
const BAR = 16;
const GAP = 0.75;
const LEFT_OF_ONE_BOX = 64;
const LEFT_OF_MANY = 128;
const MOST_ROWS = 80;
const ROWS_BEYOND = 20;
const AXIS = 22;
const COLOURS = 8;
const OTHERS = COLOURS;
const NARROWEST = 480;
const MOST_NAMES = 200;
const ROOM_FOR_A_NAME = 44;
const MOST_LISTED = 200;
const STEPS_MIN = [10, 15, 30, 60, 120, 180, 240, 360, 720, 1440];

export class Timeline {
  #answer = null;
  #spans = [];
  #bars = [];
  #picture = null;
  #rows = [0, 0];
  #frame = byId("timeline-frame");
  #pointed = byId("timeline-pointed");
  #width = 0;

  constructor() {
    // The picture has the width of its frame.
    new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width === this.#width) return;
      this.#width = width;
      this.#draw();
    }).observe(this.#frame);
    for (const kind of ["pointermove", "pointerdown"]) this.#frame.addEventListener(kind, (event) => this.#pointAt(event));
    this.#frame.addEventListener("scroll", () => this.#drawRows(), { passive: true });
    byId("timeline-details").addEventListener("toggle", () => this.#list());
  }

  update(answer) {
    this.#answer = answer;
    this.#draw();
    this.#list();
    text(byId("timeline-note"), noteOn(answer));
  }

  fail(error) {
    text(byId("timeline-note"), `Not available now: ${error.message}`);
  }

  #draw() {
    if (this.#answer === null || this.#width === 0) return;
    const { gpus } = this.#answer;
    const [since, until] = [parseTime(this.#answer.since), parseTime(this.#answer.until)];
    const width = Math.max(this.#width, NARROWEST);
    const height = gpus.length * ROW;
    const isFleet = new Set(gpus.map((gpu) => gpu.node ?? null)).size > 1;
    const left = isFleet ? LEFT_OF_MANY : LEFT_OF_ONE_BOX;
    const x = (ms) => left + ((Math.min(Math.max(ms, since), until) - since) / (until - since)) * (width - left - 4);
    const colourOf = colours(gpus);

    this.#spans = [];
    const seen = new Set();
    this.#bars = gpus.map((gpu, row) => {
      const bars = [];
      for (const { span, lane, lanes } of inLanes(gpu.spans)) {
        const [from, to] = [x(parseTime(span.since)), x(span.until === null ? until : parseTime(span.until))];
        const bar = { left: from, right: Math.max(to - GAP, from + 1), top: row * ROW + (ROW - BAR) / 2 + (lane * BAR) / lanes, height: BAR / lanes };
        this.#spans.push({ ...bar, span, gpu });
        const colour = colourOf.get(span.owner) ?? OTHERS;
        seen.add(colour);
        bars.push({ ...bar, span, colour, hasName: lanes === 1 && bar.right - bar.left > ROOM_FOR_A_NAME });
      }
      return { bars, label: labelOf(gpu, isFleet), left, right: width - 4 };
    });

    const held = gpus.reduce((sum, gpu) => sum + gpu.spans.length, 0);
    const picture = svg("svg", { width, height, role: "img", "aria-label": `${held} leases on ${gpus.length} GPUs from ${clock(since, until)} to ${clock(until, until)}; the same as a list is below` });
    // Separate, because it stays visible while the user scrolls through many GPUs.
    const axis = svg("svg", { class: "times", width, height: AXIS, "aria-hidden": "true" });
    for (const at of marks(since, until)) {
      picture.append(svg("path", { class: "grid", d: `M${x(at).toFixed(1)} 0V${height}` }));
      axis.append(svg("text", { class: "axis", x: x(at).toFixed(1), y: AXIS - 8, "text-anchor": "middle" }, hourOf(at, until - since)));
    }
    const rows = svg("g");
    picture.append(rows);
    this.#picture = rows;
    this.#rows = [0, 0];
    this.#frame.replaceChildren(axis, picture);
    this.#drawRows();
    byId("timeline-owners").replaceChildren(
      ...[...colourOf].map(([owner, colour]) => el("li", {}, el("i", { class: `swatch owner-${colour}` }), el("bdi", {}, owner ?? "(no owner named)"))),
      ...(seen.has(OTHERS) ? [el("li", {}, el("i", { class: `swatch owner-${OTHERS}` }), "all others")] : []),
    );
  }

  #drawRows() {
    if (this.#picture === null) return;
    const first = Math.max(0, Math.floor(this.#frame.scrollTop / ROW) - ROWS_BEYOND);
    const last = Math.min(this.#bars.length, first + MOST_ROWS);
    // Few rows are drawn once; of many, those around the window, again only when it comes near their edge.
    const [from, to] = this.#rows;
    const seen = [Math.floor(this.#frame.scrollTop / ROW), Math.ceil((this.#frame.scrollTop + this.#frame.clientHeight) / ROW)];
    if (from <= seen[0] && Math.min(seen[1], this.#bars.length) <= to) return;
    this.#rows = [first, last];
    const parts = [];
    const paths = new Map();
    const names = [];
    for (let row = first; row < last; row += 1) {
      const { bars, label, left, right } = this.#bars[row];
      parts.push(svg("path", { class: "ground", d: `M${left} ${row * ROW + ROW / 2}H${right}` }));
      parts.push(svg("text", { class: "axis", x: left - 8, y: row * ROW + ROW / 2 + 4, "text-anchor": "end" }, label));
      for (const bar of bars) {
        // One path for each colour, so that thousands of bars are drawn as quickly as a few.
        paths.set(bar.colour, `${paths.get(bar.colour) ?? ""}M${bar.left.toFixed(1)} ${bar.top.toFixed(1)}H${bar.right.toFixed(1)}v${bar.height.toFixed(1)}H${bar.left.toFixed(1)}Z`);
        if (bar.hasName && names.length < MOST_NAMES) names.push(bar);
      }
    }
    for (const [colour, d] of paths) parts.push(svg("path", { class: `owner-${colour}`, d }));
    for (const { left, right, top, span, colour } of names) {
      const room = Math.floor((right - left - 8) / 7);
      const name = holderName(span);
      const shown = name.length > room ? `${name.slice(0, Math.max(1, room - 1))}…` : name;
      parts.push(svg("text", { class: `name name-${colour}`, x: (left + 4).toFixed(1), y: (top + 12).toFixed(1) }, shown));
    }
    this.#picture.replaceChildren(...parts);
  }

  #pointAt(event) {
    const picture = this.#frame.lastElementChild;
    if (picture === null) return;
    const box = picture.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const found = this.#spans.find((bar) => x >= bar.left - 1 && x <= bar.right + 1 && y >= bar.top && y <= bar.top + bar.height);
    if (found) text(this.#pointed, `${gpuOfBox(found.gpu)}: ${sentence(found.span)}`);
  }

  #list() {
    if (this.#answer === null || !byId("timeline-details").open) return;
    const spans = this.#answer.gpus.flatMap((gpu) => gpu.spans.map((span) => ({ gpu, span })));
    spans.sort((a, b) => parseTime(b.span.since) - parseTime(a.span.since));
    byId("timeline-list").replaceChildren(
      ...spans.slice(0, MOST_LISTED).map(({ gpu, span }) => el("li", {}, el("span", {}, gpuOfBox(gpu)), el("bdi", {}, sentence(span)))),
      ...(spans.length > MOST_LISTED ? [el("li", {}, "", `and ${spans.length - MOST_LISTED} earlier ones`)] : []),
    );
  }
}

const LONGEST_LABEL = 17;

function labelOf(gpu, isFleet) {
  if (gpu.gpu_id === null) return "gone";
  if (!isFleet) return gpuName(gpu);
  const label = `${gpu.node}:${gpu.gpu_id}`;
  return label.length > LONGEST_LABEL ? `…${label.slice(1 - LONGEST_LABEL)}` : label;
}

function sentence(span) {
  const [since, until] = [parseTime(span.since), span.until === null ? nowMs() : parseTime(span.until)];
  const more = details(span);
  const end = span.until === null ? "until now" : `to ${clock(until)}, ${END_REASONS[span.end_reason] ?? span.end_reason}`;
  return `${holderName(span)}${more ? ` (${more})` : ""} from ${clock(since)} ${end}; ${duration((until - since) / 1000)}${span.is_shared ? ", shared" : ""}`;
}

/** The owners that held most get a colour each, and keep it while they are among them. */
function colours(gpus) {
  const heldMs = new Map();
  for (const span of gpus.flatMap((gpu) => gpu.spans)) {
    const ms = (span.until === null ? nowMs() : parseTime(span.until)) - parseTime(span.since);
    heldMs.set(span.owner, (heldMs.get(span.owner) ?? 0) + ms);
  }
  const most = [...heldMs].sort((a, b) => b[1] - a[1]).slice(0, COLOURS).map(([owner]) => owner);
  most.sort((a, b) => (a ?? "").localeCompare(b ?? ""));
  return new Map(most.map((owner, i) => [owner, i]));
}

/** Leases that share a GPU at the same time are stacked, with thinner bars. */
function inLanes(spans) {
  const placed = [];
  let together = [];
  let ends = [];
  const settle = () => {
    placed.push(...together.map((item) => ({ ...item, lanes: ends.length })));
    [together, ends] = [[], []];
  };
  for (const span of spans) {
    const start = parseTime(span.since);
    if (ends.every((end) => end <= start)) settle();
    const free = ends.findIndex((end) => end <= start);
    const lane = free < 0 ? ends.length : free;
    ends[lane] = span.until === null ? Infinity : parseTime(span.until);
    together.push({ span, lane });
  }
  settle();
  return placed;
}

/** Round times in the span, few enough that their texts do not touch. */
function marks(since, until) {
  const step = (STEPS_MIN.find((minutes) => (until - since) / (minutes * 60_000) <= 8) ?? 1440) * 60_000;
  // Counted from a local midnight, because not every day has 24 hours.
  const first = new Date(since);
  const found = [];
  for (let number = 0; ; number += 1) {
    const at = new Date(first.getFullYear(), first.getMonth(), first.getDate(), 0, (number * step) / 60_000).getTime();
    if (at >= until) return found;
    if (at >= since && at !== found.at(-1)) found.push(at);
  }
}

function hourOf(ms, spanMs) {
  const options = spanMs > 36 * 3_600_000 ? { weekday: "short", day: "numeric" } : { hour: "2-digit", minute: "2-digit" };
  return new Intl.DateTimeFormat("en-GB", options).format(ms);
}

function noteOn(answer) {
  const notes = [];
  if (answer.is_cut) notes.push("There are too many leases to show; those that ended first are left out.");
  const complete = parseTime(answer.complete_since);
  if (complete > parseTime(answer.since)) notes.push(`Not all leases that ended before ${clock(complete)} are known.`);
  if (answer.unknown_leases) notes.push(`${answer.unknown_leases} leases are left out, because a clock was set meanwhile.`);
  return notes.join(" ");
}
