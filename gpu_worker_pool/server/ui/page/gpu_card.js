// One GPU: its model, its state and the reason, its holders, its processes.

import { Curve } from "./curve.js";
import { attribute, el, KeyedChildren, show, text } from "./dom.js";
import { Meter } from "./meter.js";
import { holdersOf } from "./pool.js";
import { isDrain, plansOf, termsOf } from "./terms.js";
import { clock, details, duration, END_REASONS, gpuName, gpuNames, holderName, memory, otherLabels, percent, plural, power, stateWord, temperature } from "./words.js";

// Less memory than this without a process belongs to the driver.
const WORTH_A_LINE_MB = 1024;
const MOST_PROCESSES = 8;

export class GpuCard {
  #state = el("span", { class: "state" });
  #title = el("span");
  #name = el("bdi", { class: "model" });
  #reason = el("p", { class: "reason" });
  #memory = new Meter("Memory", "memory");
  #utilization = new Meter("Utilization", "utilization");
  #curve = new Curve();
  #temperature = el("dd");
  #power = el("dd");
  #holders = el("ul", { class: "holders", "aria-label": "Holders" });
  #plans = el("ul", { class: "outside", "aria-label": "Plans" });
  #outside = el("ul", { class: "outside" });
  #drain = el("button", { type: "button" });
  #buttons = el("p", { class: "buttons", hidden: "" }, this.#drain);
  #holderParts;
  #planParts;
  #outsideParts;
  #shown = null;

  /** `actions` change it and its leases; null for a GPU of another server. */
  constructor(actions) {
    this.node = el(
      "li",
      { class: "gpu" },
      el("div", { class: "head" }, el("h4", {}, this.#title, " ", this.#name), this.#state),
      this.#reason,
      this.#memory.node,
      this.#utilization.node,
      this.#curve.node,
      el("dl", { class: "facts" }, el("div", {}, el("dt", {}, "Temperature"), this.#temperature), el("div", {}, el("dt", {}, "Power"), this.#power)),
      this.#holders,
      this.#plans,
      this.#outside,
      this.#buttons,
    );
    this.#holderParts = new KeyedChildren(this.#holders, () => new Holder(actions));
    this.#planParts = new KeyedChildren(this.#plans, () => new Line());
    this.#outsideParts = new KeyedChildren(this.#outside, () => new Line());
    this.#drain.addEventListener("click", () => {
      const { gpu, pool, isPlanned } = this.#shown;
      if (gpu.isOutOfService) actions.undrain(gpu);
      else if (isPlanned) actions.cancelDrain(gpu);
      else actions.drain(gpu, pool);
    });
  }

  /** `mine` tells the user's own leases; null where that does not matter. */
  update(gpu, pool, readings, clocks, access, mine = null) {
    const isPlanned = pool.bookings.some((booking) => isDrain(booking) && booking.gpus.includes(gpu.uuid));
    this.#shown = { gpu, pool, isPlanned };
    attribute(this.node, "data-state", gpu.state);
    attribute(this.node, "data-mine", (mine !== null && holdersOf(gpu, pool).some((lease) => mine.owns(lease))) || null);
    text(this.#title, gpuName(gpu));
    text(this.#name, gpu.name ?? "model unknown");
    attribute(this.#name, "title", gpu.uuid);
    text(this.#state, stateWord(gpu.state));
    text(this.#reason, gpu.reason);
    const { memory_percent, utilization_percent } = pool.thresholds;
    const used = gpu.memory_percent === null ? memory(gpu.used_mb) : `${memory(gpu.used_mb)} of ${memory(gpu.total_mb)} · ${percent(gpu.memory_percent)}`;
    this.#memory.update(gpu.memory_percent, memory_percent, used);
    this.#utilization.update(gpu.utilization_percent, utilization_percent, percent(gpu.utilization_percent));
    this.#curve.update(
      readings,
      pool.thresholds,
      `The last ${duration(readings.spanS)}: memory now ${percent(gpu.memory_percent)}, utilization now ${percent(gpu.utilization_percent)}`,
    );
    text(this.#temperature, temperature(gpu.temperature_c));
    text(this.#power, power(gpu.power_draw_w));

    const holders = holdersOf(gpu, pool);
    show(this.#holders, holders.length > 0);
    this.#holderParts.arrange(holders.map((lease) => lease.id)).forEach((part, i) => part.update(holders[i], pool, clocks, access));

    const plans = plansOf(gpu, pool, clocks);
    show(this.#plans, plans.length > 0);
    this.#planParts.arrange(plans.map((_, i) => i)).forEach((part, i) => part.update(plans[i]));

    const lines = outsideLines(gpu);
    show(this.#outside, lines.length > 0);
    this.#outsideParts.arrange(lines.map((_, i) => i)).forEach((part, i) => part.update(lines[i]));

    show(this.#buttons, access.isOperator);
    text(this.#drain, gpu.isOutOfService ? "Put back into service" : isPlanned ? "Cancel planned drain" : "Drain");
    attribute(this.#drain, "aria-label", `${this.#drain.textContent} ${gpuName(gpu)}`);
  }
}

class Line {
  node = el("li");

  update(words) {
    text(this.node, words);
  }
}

/** A holder: who, what it runs, and since when. */
class Holder {
  #who = el("bdi");
  #details = el("bdi", { class: "details" });
  #times = el("span", { class: "times" });
  #gang = el("span", { class: "times" });
  #terms = el("span", { class: "times" });
  #labels = el("bdi", { class: "labels" });
  #release = el("button", { type: "button" }, "Release");
  #revoke = el("button", { type: "button" }, "Revoke");
  #buttons = el("span", { class: "buttons", hidden: "" }, this.#release, this.#revoke);
  #shown = null;
  node = el("li", {}, el("strong", {}, this.#who), " ", this.#details, this.#times, this.#gang, this.#terms, this.#labels, this.#buttons);

  constructor(actions) {
    this.#release.addEventListener("click", () => actions.release(this.#shown.lease, this.#shown.pool));
    this.#revoke.addEventListener("click", () => actions.revoke(this.#shown.lease, this.#shown.pool));
  }

  update(lease, pool, clocks, access) {
    this.#shown = { lease, pool };
    text(this.#who, holderName(lease));
    text(this.#details, details(lease));
    text(this.#times, timesOf(lease, clocks));
    text(this.#gang, lease.nodes.length > 1 ? `one lease over ${plural(lease.nodes.length, "box", "boxes")}: ${gpuNames(lease.gpus)}` : "");
    text(this.#terms, lease.state === "active" ? termsOf(lease, clocks) : "");
    attribute(this.#terms, "data-kind", lease.warning === null ? null : "warned");
    text(this.#labels, otherLabels(lease.labels));
    const isLive = lease.state === "active";
    show(this.#buttons, isLive && access.mayRelease(lease));
    show(this.#revoke, access.isOperator);
    const whose = `the lease of ${holderName(lease)}, ${lease.id}`;
    attribute(this.#release, "aria-label", `Release ${whose}`);
    attribute(this.#revoke, "aria-label", `Revoke ${whose}`);
  }
}

function timesOf(lease, clocks) {
  const heldForS = (clocks.nowMs - lease.granted_at) / 1000;
  if (lease.state === "draining") {
    return `${END_REASONS[lease.end_reason] ?? "ended"} ${duration((clocks.nowMs - lease.ended_at) / 1000)} ago; still on the GPU`;
  }
  return `since ${clock(lease.granted_at, clocks.nowMs)} (${duration(heldForS)})`;
}

/** The processes without a lease, as far as they are known. */
function outsideLines(gpu) {
  if (gpu.processes === null) {
    return gpu.outside_mb !== null && gpu.outside_mb >= WORTH_A_LINE_MB ? [`outside the pool: ${memory(gpu.outside_mb)}, by processes that cannot be seen`] : [];
  }
  // A process may belong to an exclusive lease that named no process. Then only much memory is worth a line.
  const isMuch = gpu.outside_mb !== null && gpu.outside_mb >= WORTH_A_LINE_MB;
  const worth = gpu.processes.filter((process) => process.isIgnored || process.isOutside === true || (process.isOutside === null && isMuch));
  const lines = worth.slice(0, MOST_PROCESSES).map((process) => {
    const kind = process.isIgnored ? "not counted" : process.isOutside ? "outside the pool" : "of the lease or outside";
    return `${kind}: ${process.user ? `${process.user}, ` : ""}${process.name ?? "a process"} (pid ${process.pid ?? "unknown"}), ${memory(process.used_mb)}`;
  });
  if (worth.length > MOST_PROCESSES) lines.push(`and ${worth.length - MOST_PROCESSES} more`);
  return lines;
}
