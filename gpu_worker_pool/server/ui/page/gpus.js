// All GPUs by node: this server's and those of its peers.

import { Readings } from "./curve.js";
import { attribute, byId, el, KeyedChildren, Pieces, show, text } from "./dom.js";
import { GpuCard } from "./gpu_card.js";
import { leasesOn, STATES } from "./pool.js";
import { duration, plural, stateWord } from "./words.js";

const ALL = "all";

export class Gpus {
  #nodes;
  #states;
  #pieces = new Pieces();
  #readings = new Map();
  #state = ALL;
  #fleet = [];
  #access = null;

  constructor(actions) {
    this.#nodes = new KeyedChildren(byId("nodes"), (key) => new Node(key === "" ? actions : null, this.#pieces));
    this.#states = new KeyedChildren(byId("states"), (state) => new StateButton(() => this.#choose(state)));
    byId("filter").addEventListener("input", () => this.#draw());
  }

  /** Take the server's history of its own GPUs. */
  remember(history) {
    for (const [uuid, rows] of Object.entries(history.gpus)) {
      this.#of("", uuid).replace(history.measured_at, rows.memory_percent, rows.utilization_percent, history.max_history);
    }
  }

  /** `fleet` is a list of nodes, this server first; `access` is what the user may do. */
  update(fleet, access) {
    this.#fleet = fleet;
    this.#access = access;
    const present = new Set();
    for (const node of fleet) {
      for (const gpu of node.pool.gpus) {
        present.add(`${node.key} ${gpu.key}`);
        if (node.measuredAt !== null) this.#of(node.key, gpu.key).add(node.measuredAt, gpu.memory_percent, gpu.utilization_percent);
      }
    }
    for (const key of this.#readings.keys()) if (!present.has(key)) this.#readings.delete(key);
    this.#draw();
  }

  #of(node, uuid) {
    const key = `${node} ${uuid}`;
    let readings = this.#readings.get(key);
    if (readings === undefined) this.#readings.set(key, (readings = new Readings()));
    return readings;
  }

  #choose(state) {
    this.#state = this.#state === state ? ALL : state;
    this.#draw();
  }

  #draw() {
    if (this.#access === null) return;
    const counts = new Map([[ALL, 0]]);
    for (const { pool } of this.#fleet) {
      for (const gpu of pool.gpus) {
        counts.set(ALL, counts.get(ALL) + 1);
        counts.set(gpu.state, (counts.get(gpu.state) ?? 0) + 1);
      }
    }
    if (!counts.has(this.#state)) counts.set(this.#state, 0);
    const states = [ALL, ...STATES].filter((state) => counts.has(state));
    this.#states.arrange(states).forEach((button, i) => button.update(states[i], counts.get(states[i]), states[i] === this.#state));

    const sought = byId("filter").value.trim().toLowerCase();
    const isWanted = (gpu, node) => (this.#state === ALL || gpu.state === this.#state) && (sought === "" || searchText(gpu, node).includes(sought));
    let found = 0;
    this.#nodes.arrange(this.#fleet.map((node) => node.key)).forEach((part, i) => {
      const node = this.#fleet[i];
      const gpus = node.pool.gpus.filter((gpu) => isWanted(gpu, node));
      found += gpus.length;
      part.update(node, gpus, this.#fleet.length > 1, (key) => this.#of(node.key, key), this.#access);
    });
    const nothing = byId("nothing-found");
    show(nothing, found === 0);
    text(nothing, counts.get(ALL) === 0 ? "There are no GPUs." : "No GPU matches.");
  }
}

function searchText(gpu, node) {
  const words = ({ lease, inside }) => [lease.id, lease.owner, lease.worker_id, lease.host, ...Object.values(lease.labels), ...inside.flatMap(words)];
  const of = leasesOn(gpu, node.pool).flatMap(words);
  return [node.title, `gpu ${gpu.gpu_id}`, gpu.name, gpu.uuid, stateWord(gpu.state), gpu.reason, ...of].join("\n").toLowerCase();
}

class StateButton {
  #word = el("span");
  #count = el("span", { class: "count" });
  node = el("button", { type: "button" }, this.#word, " ", this.#count);

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

/** One server's GPUs. */
class Node {
  #name = el("bdi");
  #about = el("span", { class: "quiet" });
  #link = el("a", { rel: "noreferrer" }, "its own page");
  #heading = el("div", { class: "node-head" }, el("h3", {}, this.#name), this.#about, this.#link);
  #list = el("ul", { class: "cards" });
  #cards;
  #pieces;
  node = el("div", { class: "node" }, this.#heading, this.#list);

  constructor(actions, pieces) {
    this.#cards = new KeyedChildren(this.#list, () => new GpuCard(actions));
    this.#pieces = pieces;
  }

  update(node, gpus, isOneOfMany, readingsOf, access) {
    attribute(this.#heading, "class", isOneOfMany ? "node-head" : "visually-hidden");
    text(this.#name, node.title);
    text(this.#about, aboutNode(node));
    show(this.#link, node.url !== null);
    if (node.url !== null) attribute(this.#link, "href", `${node.url}/ui`);
    attribute(this.node, "data-up", String(node.isUp));
    const isOwn = node.key === "";
    this.#cards.arrange(gpus.map((gpu) => gpu.key)).forEach((card, i) => {
      const gpu = gpus[i];
      const work = () => card.update(gpu, node.pool, readingsOf(gpu.key), node.clocks, isOwn ? access : access.none);
      this.#pieces.plan(card, work);
    });
  }
}

function aboutNode(node) {
  if (node.isUp === null) return "being asked";
  if (!node.isUp) return `no answer: ${node.error ?? "reason unknown"}${node.pool.gpus.length ? `; as it was ${duration(node.ageS)} ago` : ""}`;
  const simulated = node.key !== "" && node.pool.source === "simulated" ? ", simulated" : "";
  return `${plural(node.pool.gpus.length, "GPU")}${simulated}`;
}
