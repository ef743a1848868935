// The page: connects the live pool, the address and the user to the views. All that is shown follows from `page`, drawn once a frame.

import { Answer, Attention, Mine, Summary } from "./answer.js";
import { Dialog } from "./dialogs.js";
import { filtered } from "./facts.js";
import { MOST_ROWS, Rows, Squares } from "./gpus.js";
import { Leases, Queue } from "./leases.js";
import { ask, Live } from "./live.js";
import { Readings, Text } from "./parts.js";
import { SPANS, Timeline } from "./timeline.js";
import { Usage } from "./usage.js";
import { html, render } from "./vendor/preact.js";
import { clock, duration, plain, plural } from "./words.js";

const TOKEN = "gpu-pool.token";
const DONE_SHOWN_MS = 8000;
const MOST_REMEMBERED = 64;
// A longer history is not read: the curves begin with this page.
const MOST_HISTORY = 1000;
const CONNECTED = ["live", "polling", "connecting"];

// --- the address: which view, which filter, which GPU is open ---------------------------------------------------------

const DEFAULTS = { at: "now", find: "", show: "all", gpu: "", as: "gpus", span: "hours" };

/** What the part of the address behind # says; what it does not say is as usual. */
export function readHash(hash) {
  const [at, query = ""] = hash.replace(/^#/, "").split("?");
  const given = Object.fromEntries([...new URLSearchParams(query)].filter(([key]) => Object.hasOwn(DEFAULTS, key)));
  const url = { ...DEFAULTS, ...given, at: at === "usage" ? "usage" : "now" };
  return { ...url, span: Object.hasOwn(SPANS, url.span) ? url.span : DEFAULTS.span };
}

export function writeHash(url) {
  const said = Object.entries(url).filter(([key, value]) => key !== "at" && value !== DEFAULTS[key]);
  const query = new URLSearchParams(said).toString();
  return `#${url.at}${query === "" ? "" : `?${query}`}`;
}

// --- what the page knows ----------------------------------------------------------------------------------------------

const readings = new Readings();
let view = null;
let receivedAt = 0;
let firstVersion = null;
let me = null;
let isAsked = false;
let dialog = null;
let done = null;
let isPlanned = false;
let token = stored(() => sessionStorage.getItem(TOKEN));

/** Where storage is forbidden, the token lasts as long as the page. */
function stored(action) {
  try {
    return action();
  } catch {
    return null;
  }
}

function keep(value) {
  token = value;
  stored(() => (value === null ? sessionStorage.removeItem(TOKEN) : sessionStorage.setItem(TOKEN, value)));
}

async function identify(sent) {
  const { name, role } = await ask("ui/data/me", { token: sent });
  return { name, role, isOperator: role !== "user", hasToken: sent !== null };
}

/** Ask who the page talks to: by the token, else the Unix user on the box. A visitor is nobody, and may look. */
async function askWho() {
  isAsked = true;
  try {
    me = await identify(token);
  } catch (error) {
    me = null;
    if (error.status === 401 && token !== null) {
      keep(null);
      await askWho();
    } else if (error.status === null || error.status >= 500) isAsked = false; // ask again when there is an answer
  }
  draw();
}

function receive(next) {
  const isNew = view?.pool.serverId !== next.pool.serverId;
  if (isNew) isAsked = false;
  view = next;
  receivedAt = performance.now();
  firstVersion ??= next.version;
  const few = next.pool.gpus.length <= MOST_REMEMBERED ? next.pool.gpus : [];
  readings.add(next.isFleet ? next.now / 1000 : next.measuredAt, few);
  if (isNew && few.length > 0) readHistory();
  if (!isAsked) askWho();
  draw();
}

async function readHistory() {
  const keys = new Map(view.pool.gpus.map((gpu) => [gpu.uuid, gpu.key]));
  const { measuredAt, maxHistory } = view;
  if (maxHistory > MOST_HISTORY) return;
  try {
    readings.replace(await ask("gpu/history"), measuredAt, (uuid) => keys.get(uuid));
    draw();
  } catch {
    // The curves begin with this page.
  }
}

const live = new Live(receive, draw);

// --- what the views may do --------------------------------------------------------------------------------------------

/** Go to another view, filter or GPU. A step back in the browser undoes it, but for each letter that is typed. */
function go(change, { isTyping = false } = {}) {
  const hash = writeHash({ ...readHash(location.hash), ...change });
  if (hash === writeHash(readHash(location.hash))) return;
  history[isTyping ? "replaceState" : "pushState"](null, "", hash);
  draw();
}

function say(kind, words) {
  const shown = { kind, words };
  done = shown;
  draw();
  setTimeout(() => {
    if (done === shown) done = null;
    draw();
  }, DONE_SHOWN_MS);
}

async function call(path, options) {
  try {
    const answer = await ask(`${live.scope}${path}`, { ...options, token });
    live.read();
    return answer;
  } catch (error) {
    if (error.status === 401 && token !== null) logOut(); // it is no longer valid
    throw error;
  }
}

/** Take a token, if it is valid and still wanted when the answer comes. */
async function logIn(given, isWanted) {
  const found = await identify(given);
  if (!isWanted()) return false;
  keep(given);
  me = found;
  draw();
  return true;
}

function logOut() {
  keep(null);
  askWho();
}

/** Copy a text. Without encryption the browser has no clipboard for pages, and an older way is used. */
async function copy(text, what) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else {
      const [field, focused] = [document.createElement("textarea"), document.activeElement];
      field.value = text;
      (document.querySelector("dialog[open]") ?? document.body).append(field);
      field.select();
      const isCopied = document.execCommand("copy");
      field.remove();
      focused?.focus();
      if (!isCopied) throw new Error("the browser does not allow it");
    }
    say("good", [`Copied ${what}.`]);
  } catch (error) {
    say("bad", [`Could not copy ${what}: ${error.message}`]);
  }
}

// --- the views --------------------------------------------------------------------------------------------------------

const STATES = { connecting: "connecting", live: "live", polling: "polling every few seconds", paused: "grants pause", lost: "no connection" };

function App({ page }) {
  return html`<${Header} page=${page} />
    <main data-connection=${page.state} tabindex="-1">
      ${view !== null && page.url.at === "usage" && html`<${Usage} page=${page} />`}
      ${view !== null && page.url.at === "now" && html`<${Now} page=${page} />`}
    </main>
    ${view !== null && html`<footer class="quiet">GPU Worker Pool ${view.version}${view.docs !== null && html` · <a href=${view.docs}>API</a>`} · <a
      href="metrics">metrics</a> · times are those of your time zone</footer>`}
    <div id="notices" role="alert">${noticesOf(page).map(([key, kind, words, details]) => html`<p key=${key} class="notice" data-kind=${kind}><${Text}
      parts=${words} />${details && html`<details><summary>Details</summary>${details}</details>`}</p>`)}</div>
    ${dialog !== null && html`<${Dialog} key=${dialog.number} page=${page} />`}`;
}

function Header({ page }) {
  const { state, url } = page;
  const ageS = view?.readingAgeS == null ? null : view.readingAgeS + (performance.now() - receivedAt) / 1000;
  const title = view === null ? "GPU pool" : view.isFleet ? `Fleet of ${plural(view.boxes.length, "box", "boxes")}` : (view.pool.node ?? view.title);
  const link = (at, words) => html`<a href=${writeHash({ ...DEFAULTS, at })} aria-current=${url.at === at ? "page" : null}
    onClick=${(event) => follow(event, at)}>${words}</a>`;
  return html`<header>
    ${view !== null && url.at === "now" && html`<a class="skip" href="#gpus" onClick=${skip}>Skip to the GPUs</a>`}
    <h1><bdi class="clamped" title=${title}>${title}</bdi></h1>
    ${view?.pool.source === "simulated" && html`<span class="tag" title="These GPUs are not hardware">simulated</span>`}
    <span class="connection"><span class="word" role="status" data-state=${state}>${STATES[state]}</span> <span
      class="quiet">${view !== null && (ageS === null ? "the GPUs have not been read yet" : `measured ${duration(ageS)} ago`)}</span></span>
    <nav aria-label="Views">${link("now", "Now")}${link("usage", "Usage")}</nav>
    <span class="who">${me !== null && html`<span title=${`${me.role}${me.hasToken ? ", by token" : ", your user on this machine"}`}><bdi
      class="clamped">${me.name ?? "you"}</bdi></span>`}
      ${me?.hasToken ? html`<button type="button" onClick=${logOut}>Log out</button>` : html`<button type="button"
        disabled=${["lost", "paused"].includes(state)} onClick=${() => page.open({ kind: "login" })}>${me === null ? "Log in…" : "Token…"}</button>`}
      ${view !== null && view.pool.gpus.length > 0 && html`<button type="button" class="main" onClick=${() => page.open({ kind: "get" })}>Get a GPU</button>`}</span>
  </header>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("gpus").focus();
}

function follow(event, at) {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go({ at });
}

function Now({ page }) {
  const { url } = page;
  const isMany = view.pool.gpus.length > MOST_ROWS;
  const { gpus, isFiltered } = filtered(view, url, page.owner);
  const shapes = isMany ? ["gpus", "leases", "timeline"] : ["gpus", "leases"];
  const shape = shapes.includes(url.as) ? url.as : "gpus";
  const Shape = { leases: Leases, timeline: Timeline, gpus: isMany ? Squares : Rows }[shape];
  return html`<div class="first"><${Answer} page=${page} /><${Mine} page=${page} /></div>
    ${view.pool.gpus.length > 0 && html`<${Summary} page=${page} shape=${shape} shapes=${shapes} />`}
    <${Attention} page=${page} />
    <section id="gpus" tabindex="-1" aria-label="The GPUs">
      ${gpus.length === 0 && isFiltered && html`<p class="quiet">No GPU matches.</p>`}
      ${gpus.length > 0 && html`<${Shape} page=${page} gpus=${gpus} />`}
    </section>
    <${Queue} page=${page} />
    ${!isMany && gpus.length > 0 && html`<${Timeline} page=${page} gpus=${gpus} />`}`;
}

/** What must be known wherever the user is; a screen reader reads these when they change, so they state a time and not a duration. */
function noticesOf({ state, me: user }) {
  const found = [];
  const since = view === null ? null : clock(view.now, view.now);
  const technical = user?.isOperator ? live.failure?.message : null;
  const as = since === null ? "There is nothing to show yet." : `The page shows the pool as of ${since}.`;
  if (state === "lost") found.push(["lost", "bad", [`No connection to the server (${live.failure.message}). ${as} It tries again by itself.`]]);
  if (state === "paused") found.push(["paused", "bad", [`The server answers, but not the leader or the database behind it: grants pause, leases go on. ${as} It tries again by itself.`], technical]);
  else if (view?.pool.trouble != null) found.push(["trouble", "bad", ["The server cannot grant now: grants pause, leases go on."], user?.isOperator ? view.pool.trouble : null]);
  if (view !== null && view.version !== firstVersion) found.push(["version", "warn", [`The server is now version ${view.version}: reload this page.`]]);
  if (done !== null) found.push(["done", done.kind, done.words]);
  return found;
}

const narrow = globalThis.matchMedia?.("(max-width: 40rem)");
let dialogs = 0;

function drawNow() {
  isPlanned = false;
  const { state } = live;
  const isConnected = view !== null && CONNECTED.includes(state);
  // While the server does not answer, its clock stands still.
  const nowMs = view === null ? NaN : view.now + (isConnected ? performance.now() - receivedAt : 0);
  const page = {
    view, nowMs, state, isConnected, me, dialog, done, readings, go, say, call, copy, logIn,
    owner: me?.name ?? null,
    isNarrow: narrow.matches,
    url: readHash(location.hash),
    scope: live.scope,
    changedAt: view?.happened[0]?.at ?? 0,
    open(what) {
      dialog = { ...what, number: (dialogs += 1) };
      draw();
    },
    close(closed) {
      if (dialog !== closed) return;
      dialog = null;
      draw();
    },
  };
  document.title = titleOf(state);
  render(html`<${App} page=${page} />`, document.getElementById("page"));
}

function titleOf(state) {
  if (view === null) return "GPU pool";
  const free = view.pool.gpus.filter((gpu) => gpu.kind === "free").length;
  const words = state === "lost" ? "no connection" : `${free} free${view.pool.queueLength ? `, ${view.pool.queueLength} waiting` : ""}`;
  return plain([`${words} · `, { name: view.pool.node ?? view.title }]);
}

/** Draw in the next frame, once for all that happens until then. */
function draw() {
  if (isPlanned) return;
  isPlanned = true;
  requestAnimationFrame(drawNow);
}

/** Begin; without a document the pure parts can be tried by themselves. */
if (typeof document !== "undefined") {
  addEventListener("popstate", draw);
  narrow.addEventListener("change", draw);
  addEventListener("hashchange", draw);
  drawNow();
  live.start();
  // Times advance although nothing arrives.
  setInterval(() => document.hidden || draw(), 1000);
}
