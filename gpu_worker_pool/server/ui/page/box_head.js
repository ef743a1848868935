// The name of a box above its GPUs: whether it leads, how many are free, and whether it is known at all.

import { attribute, el, show, text } from "./dom.js";
import { duration, plural } from "./words.js";

export class BoxHead {
  #name = el("bdi");
  #leader = el("span", { class: "chip", "data-kind": "leader", hidden: "" }, "leader");
  #unknown = el("span", { class: "chip", "data-kind": "unknown", hidden: "" }, "unknown");
  #about = el("span", { class: "quiet" });
  #link = el("a", { rel: "noreferrer" }, "its own page");
  node = el("div", { class: "node-head" }, el("h3", {}, this.#name), this.#leader, this.#unknown, this.#about, this.#link);

  /** `shown` are those of its GPUs that match the filter. */
  update(box, shown) {
    text(this.#name, box.title);
    show(this.#leader, box.isLeader);
    show(this.#unknown, box.isUnknown);
    text(this.#about, aboutBox(box, shown));
    show(this.#link, box.url !== null);
    attribute(this.#link, "href", box.url === null ? null : `${box.url}/ui`);
    attribute(this.#link, "aria-label", box.url === null ? null : `its own page, ${box.title}`);
  }
}

function aboutBox(box, shown) {
  if (box.isUnknown) {
    const since = box.heardAgoS === null ? "not heard of" : `silent for ${duration(box.heardAgoS + box.clocks.viewAgeS)}`;
    return `${since}; its leases go on, nothing is granted there`;
  }
  const free = shown.filter((gpu) => gpu.state === "free").length;
  const version = box.oddVersion === null ? "" : `, version ${box.oddVersion}`;
  return `${free ? `${free} free of ` : ""}${plural(shown.length, "GPU")}${version}`;
}
