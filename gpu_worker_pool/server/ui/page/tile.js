// One GPU in the compact grid: its index, its holder or its state, how busy it is, and a mark where something is due.

import { attribute, el, show, text } from "./dom.js";
import { duration, gpuName, holderName, percent, shortClock, stateWord } from "./words.js";

const SHORT = { out_of_service: "off", unhealthy: "faulty" };

export class Tile {
  #index = el("span", { class: "index" });
  #mark = el("span", { class: "due" });
  #label = el("bdi", { class: "label" });
  #load = el("i", { class: "load" });
  #width = null;
  node = el("button", { type: "button", class: "tile", tabindex: -1 }, this.#index, this.#mark, this.#label, this.#load);

  update(gpu, box, { isMine, isTogether, isOpen, isCurrent, leases }) {
    attribute(this.node, "data-state", gpu.state);
    attribute(this.node, "data-mine", isMine || null);
    attribute(this.node, "data-together", isTogether || null);
    attribute(this.node, "aria-expanded", String(isOpen));
    attribute(this.node, "aria-controls", isOpen ? "details" : null);
    attribute(this.node, "tabindex", isCurrent ? 0 : -1);
    text(this.#index, gpu.gpu_id === null ? "?" : String(gpu.gpu_id));
    const held = leases.filter((lease) => lease.state !== "queued");
    text(this.#label, held.length > 1 ? `${held.length} share` : held.length === 1 ? holderName(held[0]) : (SHORT[gpu.state] ?? stateWord(gpu.state)));
    const due = dueOf(held, box.clocks);
    text(this.#mark, due.mark);
    attribute(this.#mark, "data-kind", due.kind);
    const load = gpu.utilization_percent;
    show(this.#load, load !== null && gpu.state !== "unknown");
    const width = `${Math.min(Math.max(load ?? 0, 0), 100).toFixed(0)}%`;
    if (width !== this.#width) this.#load.style.width = this.#width = width;
    const words = sentence(gpu, box, held, due, isMine);
    attribute(this.node, "aria-label", words);
    attribute(this.node, "title", words);
  }
}

/** What is due first among the leases of a GPU: an end that was announced, idleness, a time limit, a gang. */
function dueOf(leases, clocks) {
  const warned = leases.find((lease) => lease.warning !== null);
  if (warned !== undefined) {
    const left = duration((warned.warning.ends_at - clocks.nowMs) / 1000);
    return { kind: "warned", mark: left, words: `ends in ${left}` };
  }
  const idle = leases.find((lease) => lease.idle_s !== null);
  if (idle !== undefined) return { kind: "idle", mark: "idle", words: `idle for ${duration(idle.idle_s + clocks.viewAgeS)}` };
  const limited = leases.find((lease) => Number.isFinite(lease.ends_at));
  if (limited !== undefined) {
    const at = shortClock(limited.ends_at, clocks.nowMs);
    return { kind: "limit", mark: `to\u00a0${at}`, words: `until ${at}` };
  }
  const gang = leases.find((lease) => lease.nodes.length > 1);
  if (gang !== undefined) return { kind: "gang", mark: `${gang.nodes.length}\u00a0boxes`, words: "" };
  return { kind: null, mark: "", words: "" };
}

function sentence(gpu, box, held, due, isMine) {
  const gang = held.find((lease) => lease.nodes.length > 1);
  return [
    `${gpuName(gpu)} of ${box.title}`,
    stateWord(gpu.state),
    held.map(holderName).join(", "),
    isMine ? "yours" : "",
    gang === undefined ? "" : `one lease over ${gang.nodes.length} boxes`,
    due.words,
    gpu.utilization_percent === null ? "" : `utilization ${percent(gpu.utilization_percent)}`,
    gpu.memory_percent === null ? "" : `memory ${percent(gpu.memory_percent)}`,
  ]
    .filter((part) => part !== "")
    .join(", ");
}
