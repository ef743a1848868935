// The whole at a glance: how many GPUs are free, how busy the held ones are, who waits, what is idle, what is mine; and of
// a fleet its boxes, its leader and how far this server is behind it.

import { attribute, byId, el, KeyedChildren, show, text } from "./dom.js";
import { holdersOf, STATES } from "./pool.js";
import { startOf } from "./terms.js";
import { duration, percent, plural, stateWord } from "./words.js";

const OUT = ["out_of_service", "unhealthy", "unknown"];
const HELD = ["leased", "shared"];

export class Summary {
  #mine;
  #segments = new KeyedChildren(byId("share"), (state) => ({ node: el("i", { "data-state": state }) }));
  #chips = new KeyedChildren(byId("fleet"), () => new Chip());
  #shares = "";

  constructor(mine) {
    this.#mine = mine;
  }

  /** `own` is this server's pool; `fleet` is null on one box. */
  update(own, boxes, fleet) {
    const all = boxes.flatMap((box) => box.gpus.map((gpu) => ({ gpu, box })));
    const byState = new Map();
    for (const { gpu } of all) byState.set(gpu.state, (byState.get(gpu.state) ?? 0) + 1);
    const sum = (states) => states.reduce((total, state) => total + (byState.get(state) ?? 0), 0);
    stat("free", String(sum(["free"])), `of ${plural(all.length, "GPU")}`);
    const held = all.filter(({ gpu }) => HELD.includes(gpu.state));
    const busy = held.map(({ gpu }) => gpu.utilization_percent).filter((value) => value !== null);
    stat("held", String(held.length), busy.length ? `${percent(busy.reduce((a, b) => a + b, 0) / busy.length)} utilization` : "");
    this.#waiting(own);
    const idle = all.filter(({ gpu, box }) => box.pool.hasIdle && holdersOf(gpu, box.pool).some((lease) => lease.idle_s !== null)).length;
    stat("idle", String(idle), idle ? "held, not computing" : "no holder is idle");
    const out = sum(OUT);
    stat("out", String(out), out ? OUT.filter((state) => byState.has(state)).map((state) => `${byState.get(state)} ${stateWord(state)}`).join(", ") : "all can be used");
    this.#drawMine(all, own.pool);
    this.#drawShares(byState, all.length);
    this.#drawFleet(boxes, fleet);
  }

  #waiting({ pool, clocks }) {
    const first = pool.queue[0];
    stat("waiting", String(pool.queueLength), first === undefined ? "nobody waits" : startOf(first, clocks) || `the first for ${duration((clocks.nowMs - first.requested_at) / 1000)}`);
  }

  #drawMine(all, pool) {
    const { name } = this.#mine;
    this.#mine.draw();
    if (name === null) {
      stat("mine", "", "");
      return;
    }
    const held = all.filter(({ gpu, box }) => holdersOf(gpu, box.pool).some((lease) => this.#mine.owns(lease))).length;
    const waiting = pool.queue.filter((lease) => this.#mine.owns(lease));
    const places = waiting.length === 0 ? "" : `, ${waiting.length} waiting${waiting[0].position === null ? "" : ` (position ${waiting[0].position})`}`;
    stat("mine", String(held), `of ${name}${places}`);
  }

  #drawShares(byState, total) {
    const states = STATES.filter((state) => byState.has(state));
    const parts = this.#segments.arrange(states);
    const shares = states.map((state) => byState.get(state)).join();
    if (shares !== this.#shares) parts.forEach(({ node }, i) => (node.style.flexGrow = String(byState.get(states[i]))));
    this.#shares = shares;
    attribute(byId("share"), "aria-label", states.map((state) => `${byState.get(state)} ${stateWord(state)}`).join(", ") || "no GPUs");
    show(byId("share"), total > 0);
  }

  #drawFleet(boxes, fleet) {
    show(byId("fleet"), fleet !== null);
    if (fleet === null) return;
    const unknown = boxes.filter((box) => box.isUnknown);
    const chips = [
      ["boxes", `Fleet of ${plural(boxes.length, "box", "boxes")}`, null],
      ["leader", fleet.leader === null ? "no leader known" : `leader ${fleet.leader}`, fleet.leader === null ? "unknown" : "leader"],
      ["epoch", fleet.epoch === null ? "" : `epoch ${fleet.epoch}`, null],
      ["lag", lagOf(fleet), fleet.lag_s === null || fleet.lag_s > 5 ? "unknown" : null],
      ["unknown", unknown.length ? `${plural(unknown.length, "box", "boxes")} unknown: ${namesOf(unknown)}` : "", "unknown"],
    ].filter(([, words]) => words !== "");
    this.#chips.arrange(chips.map(([key]) => key)).forEach((chip, i) => chip.update(chips[i][1], chips[i][2]));
  }
}

const MOST_NAMED = 5;

const namesOf = (boxes) => [...boxes.slice(0, MOST_NAMED).map((box) => box.title), ...(boxes.length > MOST_NAMED ? ["…"] : [])].join(", ");

function lagOf(fleet) {
  if (fleet.role === "leader") return "this server leads";
  if (fleet.lag_s === null) return "how far this server is behind is unknown";
  return `this server is ${fleet.lag_s < 10 ? `${fleet.lag_s.toFixed(1)}\u00a0s` : duration(fleet.lag_s)} behind`;
}

function stat(name, value, about) {
  text(byId(`stat-${name}`), value);
  text(byId(`stat-${name}-about`), about);
  attribute(byId(`stat-${name}`).parentNode, "data-some", value === "" || value === "0" ? null : "");
}

class Chip {
  node = el("li", { class: "chip" });

  update(words, kind) {
    text(this.node, words);
    attribute(this.node, "data-kind", kind);
  }
}
