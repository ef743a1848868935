// All changes to the document. Texts are set as text; no code parses markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** A new element. Attributes that are null or false are left out; children are elements or texts. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) attribute(node, name, value);
  node.append(...children);
  return node;
}

/** Set a text, and leave the document alone if it is unchanged: most texts of each second are. */
export function text(node, value) {
  const shown = node.firstChild;
  if (shown === null ? value !== "" : shown.data !== value) node.textContent = value;
}

export function attribute(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function show(node, isShown) {
  if (node.hidden !== isShown) return;
  if (!isShown) keepFocusFrom(node);
  node.hidden = !isShown;
}

/** Keep keyboard focus near a node that is removed, instead of at the top of the page. */
function keepFocusFrom(node) {
  if (node.contains(document.activeElement)) node.closest("section")?.focus({ preventScroll: true });
}

/**
 * The children of an element, one for each key: children of new keys are made, those of missing keys removed, and all
 * are put in the order of the keys. A child has a `node`, and usually an `update`.
 */
export class KeyedChildren {
  #parent;
  #make;
  #kept = new Map();

  constructor(parent, make) {
    this.#parent = parent;
    this.#make = make;
  }

  /** Return the children of these keys, in order. */
  arrange(keys) {
    const wanted = new Set(keys);
    for (const [key, part] of this.#kept) {
      if (!wanted.has(key)) {
        keepFocusFrom(part.node);
        part.node.remove();
        this.#kept.delete(key);
      }
    }
    let next = this.#parent.firstChild;
    return [...wanted].map((key) => {
      let part = this.#kept.get(key);
      if (part === undefined) this.#kept.set(key, (part = this.#make(key)));
      if (part.node === next) next = next.nextSibling;
      else this.#parent.insertBefore(part.node, next);
      return part;
    });
  }
}

/**
 * Splits work into pieces, so that each frame has time for scrolling and typing. Work that is planned again before it is
 * done replaces the earlier plan.
 */
export class Pieces {
  static BUDGET_MS = 5;
  #planned = new Map();
  #isRunning = false;

  plan(key, work) {
    this.#planned.set(key, work);
    if (!this.#isRunning) {
      this.#isRunning = true;
      requestAnimationFrame(() => this.#run());
    }
  }

  #run() {
    const end = performance.now() + Pieces.BUDGET_MS;
    for (const [key, work] of this.#planned) {
      this.#planned.delete(key);
      work();
      if (performance.now() >= end) break;
    }
    this.#isRunning = this.#planned.size > 0;
    if (this.#isRunning) requestAnimationFrame(() => this.#run());
  }
}
