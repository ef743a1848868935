// The compact grid: a GPU a tile, and one GPU in full below its line. Only the lines that are seen are in the document,
// so that ten thousand GPUs cost as much as two hundred.

import { attribute, byId, el, KeyedChildren, show, text } from "./dom.js";
import { GpuCard } from "./gpu_card.js";
import { BoxHead } from "./box_head.js";
import { layOut, linesBetween, neighbour } from "./layout.js";
import { holdersOf } from "./pool.js";
import { Tile } from "./tile.js";

// So far beyond the window lines are drawn, so that scrolling does not show gaps.
const BEYOND_PX = 400;
const ARROWS = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"];
const keyOf = (box, gpu) => `${box.key} ${gpu.key}`;

export class Grid {
  #frame = byId("grid");
  #lines;
  #details;
  #layout = { lines: [], perRow: 1, abreast: 1, height: 0 };
  #places = new Map();
  #width = 0;
  #boxes = [];
  #hasHeads = false;
  #mine = null;
  #readingsOf = null;
  #access = null;
  #current = null;
  #open = null;
  #isPlanned = false;
  #onOpen;

  /** `onOpen` is called with the GPU that is shown in full, or null. */
  constructor(actions, onOpen) {
    this.#onOpen = onOpen;
    this.#details = new Details(actions, () => this.#close(), () => this.#plan(true));
    this.#lines = new KeyedChildren(this.#frame, (key) => (key === "details" ? this.#details : new Line()));
    new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width === this.#width || width === 0) return;
      this.#width = width;
      this.#plan(true);
    }).observe(this.#frame);
    addEventListener("scroll", () => this.#plan(false), { passive: true });
    addEventListener("resize", () => this.#plan(false));
    this.#frame.addEventListener("click", (event) => this.#click(event));
    this.#frame.addEventListener("keydown", (event) => this.#press(event));
    this.#frame.addEventListener("focusin", (event) => {
      const key = event.target.closest(".tile")?.dataset.key;
      if (key !== undefined && key !== this.#current) {
        this.#current = key;
        this.#plan(false);
      }
    });
  }

  /** The key of the GPU that is shown in full. */
  get open() {
    return this.#open;
  }

  update(boxes, hasHeads, mine, readingsOf, access) {
    this.#boxes = boxes;
    this.#hasHeads = hasHeads;
    this.#mine = mine;
    this.#readingsOf = readingsOf;
    this.#access = access;
    this.#plan(true);
  }

  /** Draw in the next frame, once for all that happens until then. */
  #plan(isNew) {
    this.#isNew ||= isNew;
    if (this.#isPlanned) return;
    this.#isPlanned = true;
    requestAnimationFrame(() => {
      this.#isPlanned = false;
      if (!this.#frame.hidden && this.#access !== null) this.#draw();
    });
  }

  #isNew = false;

  #arrange() {
    this.#isNew = false;
    this.#width ||= Math.floor(this.#frame.getBoundingClientRect().width);
    this.#layout = layOut(this.#boxes, this.#width, this.#hasHeads);
    this.#places.clear();
    this.#layout.lines.forEach(({ parts }, line) =>
      parts.forEach(({ box, from, to }, part) => {
        for (let at = from; at < to; at += 1) this.#places.set(keyOf(box, box.gpus[at]), { line, part, at });
      }),
    );
    if (this.#open !== null && !this.#places.has(this.#open)) this.#setOpen(null);
    if (!this.#places.has(this.#current)) this.#current = this.#open ?? this.#places.keys().next().value ?? null;
  }

  #draw() {
    if (this.#isNew) this.#arrange();
    const { lines, height } = this.#layout;
    const openLine = this.#open === null ? Infinity : this.#places.get(this.#open).line;
    const room = openLine === Infinity ? 0 : this.#details.height;
    const topOf = (index) => lines[index].top + (index > openLine ? room : 0);
    const frameTop = this.#frame.getBoundingClientRect().top;
    // Below the line of the open GPU all is further down.
    const [from, to] = [-frameTop - BEYOND_PX, -frameTop + innerHeight + BEYOND_PX];
    const [first] = linesBetween(lines, from - room, to);
    const [, last] = linesBetween(lines, from, to);
    const shown = new Set();
    for (let i = first; i < last; i += 1) if (topOf(i) + lines[i].height >= from && topOf(i) <= to) shown.add(i);
    // The focus must not be lost while the user scrolls; and the Tab key must find the grid.
    const pinned = this.#current === null ? null : this.#places.get(this.#current).line;
    if (pinned !== null) shown.add(pinned);
    if (openLine !== Infinity) shown.add(openLine);
    const order = [...shown].sort((a, b) => a - b);
    const keys = order.flatMap((i) => (i === openLine ? [`line ${lines[i].key}`, "details"] : [`line ${lines[i].key}`]));
    const held = this.#open === null ? new Set() : new Set(this.#found(this.#open).gpu.leases);
    const parts = this.#lines.arrange(keys);
    let next = 0;
    for (const i of order) {
      parts[next++].update(lines[i], topOf(i), this.#layout, (box, gpu) => this.#about(box, gpu, held));
      if (i === openLine) {
        const { box, gpu } = this.#found(this.#open);
        parts[next++].update(this.#open, box, gpu, lines[i].top + lines[i].height, this.#readingsOf(box.key, gpu.key), this.#access);
      }
    }
    const total = `${height + room}px`;
    if (this.#frame.style.height !== total) this.#frame.style.height = total;
  }

  #about(box, gpu, held) {
    const key = keyOf(box, gpu);
    const leases = holdersOf(gpu, box.pool);
    return {
      key,
      leases,
      isMine: leases.some((lease) => this.#mine.owns(lease)),
      isTogether: key !== this.#open && gpu.leases.some((id) => held.has(id)),
      isOpen: key === this.#open,
      isCurrent: key === this.#current,
    };
  }

  #found(key) {
    const { line, part, at } = this.#places.get(key);
    const { box } = this.#layout.lines[line].parts[part];
    return { box, gpu: box.gpus[at] };
  }

  #setOpen(key) {
    this.#open = key;
    this.#onOpen(key === null ? null : this.#found(key));
  }

  #click(event) {
    const key = event.target.closest(".tile")?.dataset.key;
    if (key === undefined || !this.#places.has(key)) return;
    this.#current = key;
    this.#setOpen(this.#open === key ? null : key);
    this.#draw();
  }

  #close() {
    const key = this.#open;
    this.#setOpen(null);
    this.#draw();
    if (key !== null) this.#focus(key);
  }

  #press(event) {
    if (event.key === "Escape" && this.#open !== null) {
      event.preventDefault();
      this.#close();
      return;
    }
    const key = event.target.closest(".tile")?.dataset.key;
    const place = this.#places.get(key);
    if (place === undefined || event.altKey || event.metaKey) return;
    let to = null;
    if (ARROWS.includes(event.key)) to = neighbour(this.#layout, place, event.key);
    else if (event.key === "Home" || event.key === "End") to = this.#end(place, event.key, event.ctrlKey);
    if (to === null) return;
    event.preventDefault();
    const { box } = this.#layout.lines[to.line].parts[to.part];
    const target = keyOf(box, box.gpus[to.at]);
    this.#current = target;
    if (this.#open !== null) this.#setOpen(target);
    this.#draw();
    this.#focus(target);
  }

  /** The first or last GPU of this box, or of all with the Control key. */
  #end({ line, part }, key, isAll) {
    const isEnd = key === "End";
    const { box } = this.#layout.lines[line].parts[part];
    const boxes = isAll ? this.#boxes.filter((each) => each.gpus.length > 0) : [box];
    const chosen = isEnd ? boxes.at(-1) : boxes[0];
    return this.#places.get(keyOf(chosen, isEnd ? chosen.gpus.at(-1) : chosen.gpus[0]));
  }

  #focus(key) {
    const tile = [...this.#frame.querySelectorAll(".tile")].find((node) => node.dataset.key === key);
    if (tile === undefined) return;
    tile.focus({ preventScroll: true });
    tile.scrollIntoView({ block: "nearest" });
  }
}

/** Some boxes abreast, or some rows of a large one. */
class Line {
  #parts;
  #top = null;
  #columns = null;
  node = el("div", { class: "grid-line" });

  constructor() {
    this.#parts = new KeyedChildren(this.node, () => new Part());
  }

  update(line, top, { perRow, abreast }, aboutOf) {
    if (top !== this.#top) this.node.style.top = `${(this.#top = top)}px`;
    if (abreast !== this.#columns) this.node.style.gridTemplateColumns = `repeat(${(this.#columns = abreast)}, minmax(0, 1fr))`;
    this.#parts.arrange(line.parts.map((part) => part.box.key)).forEach((part, i) => part.update(line.parts[i], perRow, aboutOf));
  }
}

/** A box, or some rows of it: its name and its tiles. */
class Part {
  #head = new BoxHead();
  #tiles = el("div", { class: "tiles", role: "group" });
  #children = new KeyedChildren(this.#tiles, () => new Tile());
  #columns = null;
  node = el("div", { class: "grid-box" }, this.#head.node, this.#tiles);

  update({ box, from, to, hasHead }, perRow, aboutOf) {
    show(this.#head.node, hasHead);
    if (hasHead) this.#head.update(box, box.gpus);
    attribute(this.node, "data-up", String(!box.isUnknown));
    attribute(this.#tiles, "aria-label", `GPUs of ${box.title}`);
    if (perRow !== this.#columns) this.#tiles.style.gridTemplateColumns = `repeat(${(this.#columns = perRow)}, minmax(0, 1fr))`;
    const gpus = box.gpus.slice(from, to);
    this.#children.arrange(gpus.map((gpu) => gpu.key)).forEach((tile, i) => {
      const about = aboutOf(box, gpus[i]);
      tile.node.dataset.key = about.key;
      tile.update(gpus[i], box, about);
    });
  }
}

/** One GPU in full, below its line. */
class Details {
  #title = el("h3", { id: "details-title" });
  #close = el("button", { type: "button" }, "Close");
  #list = el("ul", { class: "cards" });
  #cards;
  #top = null;
  height = 0;
  node = el(
    "div",
    { id: "details", class: "in-full", role: "region", "aria-labelledby": "details-title" },
    el("div", { class: "in-full-head" }, this.#title, this.#close),
    this.#list,
  );

  constructor(actions, onClose, onResize) {
    this.#cards = new KeyedChildren(this.#list, () => new GpuCard(actions));
    this.#close.addEventListener("click", onClose);
    new ResizeObserver(() => {
      const height = this.node.isConnected ? this.node.offsetHeight + 12 : 0;
      if (height === this.height) return;
      this.height = height;
      onResize();
    }).observe(this.node);
  }

  update(key, box, gpu, top, readings, access) {
    if (top !== this.#top) this.node.style.top = `${(this.#top = top)}px`;
    text(this.#title, box.title);
    const [card] = this.#cards.arrange([key]);
    card.update(gpu, box.pool, readings, box.clocks, access);
  }
}
