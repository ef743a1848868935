// All GPUs by box: this server's, and those of its fleet. Few are shown as cards, many as a grid.

import { BoxHead } from "./box_head.js";
import { Readings } from "./curve.js";
import { attribute, byId, el, KeyedChildren, Pieces, show, text } from "./dom.js";
import { GpuCard } from "./gpu_card.js";
import { Grid } from "./grid.js";
import { holdersOf, STATES } from "./pool.js";
import { remember, remembered } from "./remembered.js";
import { stateWord } from "./words.js";

const ALL = "all";
const MINE = "mine";
const IDLE = "idle";
const VIEW = "view";
// More GPUs than this are shown as a grid, unless the user chooses.
export const MOST_AS_CARDS = 16;
// Each card has a hundred elements: more than this many would make the page slow, whatever the user chooses.
const MOST_CARDS = 256;
// The readings of more GPUs than this are not kept: only those of the one that is shown in full.
const MOST_REMEMBERED = 512;

export class Gpus {
  #nodes;
  #states;
  #grid;
  #pieces = new Pieces();
  #readings = new Map();
  #state = ALL;
  #boxes = [];
  #access = null;
  #mine;
  #chosenView = remembered(VIEW);
  #onView;

  /** `onOpen` is called with the GPU that is shown in full, `onView` with `cards` or `grid` when it changes. */
  constructor(actions, mine, onOpen, onView) {
    this.#mine = mine;
    this.#onView = onView;
    this.#nodes = new KeyedChildren(byId("nodes"), () => new Box(actions, this.#pieces));
    this.#grid = new Grid(actions, onOpen);
    this.#states = new KeyedChildren(byId("states"), (state) => new StateButton(() => this.choose(state)));
    byId("filter").addEventListener("input", () => this.#draw());
    for (const view of ["cards", "grid"]) {
      byId(`view-${view}`).addEventListener("click", () => {
        this.#chosenView = view;
        remember(VIEW, view);
        this.#draw();
      });
    }
  }

  get #count() {
    return this.#boxes.reduce((sum, box) => sum + box.gpus.length, 0);
  }

  get view() {
    const count = this.#count;
    if (count > MOST_CARDS) return "grid";
    return this.#chosenView ?? (count > MOST_AS_CARDS ? "grid" : "cards");
  }

  /** Whether the server's history is worth its bytes. */
  get keepsReadings() {
    return this.#count <= MOST_REMEMBERED;
  }

  /** Take the server's history of its own GPUs. */
  remember(history) {
    for (const [uuid, rows] of Object.entries(history.gpus)) {
      this.#of("", uuid).replace(history.measured_at, rows.memory_percent, rows.utilization_percent, history.max_history);
    }
  }

  /** `boxes` are those of this server's pool; `access` is what the user may do. */
  update(boxes, access) {
    this.#boxes = boxes;
    this.#access = access;
    const present = new Set();
    const isKept = this.keepsReadings ? () => true : (key) => key === this.#grid.open;
    for (const box of boxes) {
      for (const gpu of box.gpus) {
        const key = `${box.key} ${gpu.key}`;
        if (!isKept(key)) continue;
        present.add(key);
        if (box.measuredAt !== null && !box.isUnknown) this.#of(box.key, gpu.key).add(box.measuredAt, gpu.memory_percent, gpu.utilization_percent);
      }
    }
    for (const key of this.#readings.keys()) if (!present.has(key)) this.#readings.delete(key);
    this.#draw();
  }

  /** Show only the GPUs in this state, or all again. */
  choose(state) {
    this.#state = this.#state === state ? ALL : state;
    this.#draw();
  }

  #of(box, uuid) {
    const key = `${box} ${uuid}`;
    let readings = this.#readings.get(key);
    if (readings === undefined) this.#readings.set(key, (readings = new Readings()));
    return readings;
  }

  #draw() {
    if (this.#access === null) return;
    const isMine = (gpu, box) => this.#mine.name !== null && holdersOf(gpu, box.pool).some((lease) => this.#mine.owns(lease));
    const isIdle = (gpu, box) => box.pool.hasIdle && holdersOf(gpu, box.pool).some((lease) => lease.idle_s !== null);
    const counts = new Map([[ALL, 0]]);
    const count = (state) => counts.set(state, (counts.get(state) ?? 0) + 1);
    if (this.#mine.name !== null) counts.set(MINE, 0);
    for (const box of this.#boxes) {
      for (const gpu of box.gpus) {
        count(ALL);
        count(gpu.state);
        if (isMine(gpu, box)) count(MINE);
        if (isIdle(gpu, box)) count(IDLE);
      }
    }
    if (!counts.has(this.#state)) counts.set(this.#state, 0);
    const states = [ALL, ...STATES, IDLE, MINE].filter((state) => counts.has(state));
    this.#states.arrange(states).forEach((button, i) => button.update(states[i], counts.get(states[i]), states[i] === this.#state));

    const sought = byId("filter").value.trim().toLowerCase();
    const isChosen = { [ALL]: () => true, [MINE]: isMine, [IDLE]: isIdle }[this.#state] ?? ((gpu) => gpu.state === this.#state);
    const isFiltered = this.#state !== ALL || sought !== "";
    const isWanted = (gpu, box) => isChosen(gpu, box) && (sought === "" || searchText(gpu, box).includes(sought));
    const shown = isFiltered ? this.#boxes.map((box) => ({ ...box, gpus: box.gpus.filter((gpu) => isWanted(gpu, box)) })) : this.#boxes;
    this.#drawView(shown, isFiltered, counts.get(ALL));
    const nothing = byId("nothing-found");
    show(nothing, shown.every((box) => box.gpus.length === 0));
    text(nothing, counts.get(ALL) === 0 ? "There are no GPUs." : "No GPU matches.");
  }

  #drawView(shown, isFiltered, total) {
    const { view } = this;
    if (document.body.dataset.view !== view) {
      attribute(document.body, "data-view", view);
      this.#onView(view);
    }
    for (const name of ["cards", "grid"]) attribute(byId(`view-${name}`), "aria-pressed", String(name === view));
    attribute(byId("view-cards"), "disabled", total > MOST_CARDS ? "" : null);
    attribute(byId("view-cards"), "title", total > MOST_CARDS ? `Cards are for up to ${MOST_CARDS} GPUs` : null);
    show(byId("views"), total > 0);
    const hasHeads = this.#boxes.length > 1;
    const readingsOf = (box, key) => this.#of(box, key);
    show(byId("nodes"), view === "cards");
    show(byId("grid"), view === "grid");
    if (view === "grid") {
      this.#nodes.arrange([]);
      this.#grid.update(isFiltered ? shown.filter((box) => box.gpus.length > 0) : shown, hasHeads, this.#mine, readingsOf, this.#access);
    } else {
      this.#nodes.arrange(shown.map((box) => box.key)).forEach((part, i) => part.update(shown[i], hasHeads, readingsOf, this.#access, this.#mine));
    }
  }
}

function searchText(gpu, box) {
  const words = (lease) => [lease.id, lease.owner, lease.worker_id, lease.host, ...Object.values(lease.labels)];
  const of = holdersOf(gpu, box.pool).flatMap(words);
  return [box.title, `gpu ${gpu.gpu_id}`, gpu.name, gpu.uuid, stateWord(gpu.state), gpu.reason, ...of].join("\n").toLowerCase();
}

class StateButton {
  #word = el("span");
  #count = el("span", { class: "count" });
  node = el("button", { type: "button" }, el("i", { class: "dot", "aria-hidden": "true" }), this.#word, " ", this.#count);

  constructor(onClick) {
    this.node.addEventListener("click", onClick);
  }

  update(state, count, isChosen) {
    text(this.#word, stateWord(state));
    text(this.#count, String(count));
    attribute(this.node, "data-state", state);
    attribute(this.node, "aria-pressed", String(isChosen));
  }
}

/** One box's GPUs as cards. */
class Box {
  #head = new BoxHead();
  #list = el("ul", { class: "cards" });
  #cards;
  #pieces;
  node = el("div", { class: "node" }, this.#head.node, this.#list);

  constructor(actions, pieces) {
    this.#cards = new KeyedChildren(this.#list, () => new GpuCard(actions));
    this.#pieces = pieces;
  }

  update(box, isOneOfMany, readingsOf, access, mine) {
    attribute(this.#head.node, "class", isOneOfMany ? "node-head" : "visually-hidden");
    this.#head.update(box, box.gpus);
    attribute(this.node, "data-up", String(!box.isUnknown));
    this.#cards.arrange(box.gpus.map((gpu) => gpu.key)).forEach((card, i) => {
      const gpu = box.gpus[i];
      const work = () => card.update(gpu, box.pool, readingsOf(box.key, gpu.key), box.clocks, access, mine);
      this.#pieces.plan(card, work);
    });
  }
}
