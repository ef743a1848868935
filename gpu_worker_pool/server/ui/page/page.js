// The page: connects the live pool to the parts that show it.

import { Access, Actions, TokenDialog } from "./actions.js";
import { Repeated } from "./ask.js";
import { boxesOf } from "./boxes.js";
import { attribute, byId, el, KeyedChildren, show, text } from "./dom.js";
import { Gpus } from "./gpus.js";
import { Happened } from "./happened.js";
import { Live } from "./live.js";
import { Mine } from "./mine.js";
import { serverTimeAgeS, setNow } from "./now.js";
import { addDetails, readBoxes, readFleet, readPool } from "./pool.js";
import { Queue } from "./queue.js";
import { Quotas } from "./quotas.js";
import { Summary } from "./summary.js";
import { Timeline } from "./timeline.js";
import { Usage } from "./usage.js";
import { Weeks } from "./weeks.js";
import { clock, duration, naming, parseTime } from "./words.js";

const HISTORY_EVERY_MS = 30_000;
const ACCOUNTS_EVERY_MS = 60_000;
const ACCOUNTS_SOON_MS = 3000;
const WEEKS_EVERY_MS = 300_000;
const HEALTH_EVERY_MS = 5000;
const ONE_GPU_EVERY_MS = 2000;
const QUOTAS_EVERY_MS = 10_000;
// Accounts may be slightly older than the time that they state.
const ACCOUNTS_LAG_MS = 2000;
const DONE_SHOWN_MS = 8000;
const REDRAW_AFTER_MS = 900;
// Of very many GPUs only tiles are seen, whose times are coarse.
const REDRAW_MANY_AFTER_MS = 5000;

const access = new Access(() => draw());
const actions = new Actions(access, (kind, words) => {
  say(kind, words);
  live.read();
});
const tokenDialog = new TokenDialog(access);
const mine = new Mine(access, () => draw());
const gpus = new Gpus(actions, mine, askInFull, placeQueue);
const summary = new Summary(mine);
const weeks = new Weeks();
const queue = new Queue(actions);
const happened = new Happened();
const usage = new Usage();
const timeline = new Timeline();
const quotas = new Quotas();
const notices = new KeyedChildren(byId("notices"), () => new Notice());

let view = null;
let pool = null;
let boxes = null;
let home = null;
let ownPart = null;
let inFull = null;
let fleet = null;
let firstVersion = null;
let newest = null;
let done = null;
let drawnAt = 0;

const live = new Live(receive, draw);
const history = new Repeated("ui/data/history", HISTORY_EVERY_MS, (answer) => {
  gpus.remember(answer);
  draw();
});
const usageToday = accounts("ui/data/usage", usage);
const lastHours = accounts("ui/data/timeline?hours=6", timeline);
const byWeek = new Repeated("ui/data/weeks?weeks=4", WEEKS_EVERY_MS, (answer) => weeks.update(answer), (error) => weeks.fail(error));
const oneGpu = new Repeated("", ONE_GPU_EVERY_MS, (answer) => {
  inFull = answer;
  addDetails(pool, inFull);
  draw();
});
const allQuotas = new Repeated("ui/data/quotas", QUOTAS_EVERY_MS, (answer) => quotas.update(answer), (error) => quotas.fail(error));
// The leader tells of the fleet; how far this box is behind, only itself knows.
const ownHealth = new Repeated("health", HEALTH_EVERY_MS, (answer) => {
  ownPart = readFleet(answer.fleet);
});

function accounts(path, shown) {
  const repeated = new Repeated(path, ACCOUNTS_EVERY_MS, receiveAccounts, (error) => shown.fail(error));
  function receiveAccounts(answer) {
    shown.update(answer);
    // The server makes one answer for several seconds: it may be older than the last event.
    if (newest !== null && parseTime(answer.until) < parseTime(newest) + ACCOUNTS_LAG_MS) repeated.repeatWithin(ACCOUNTS_SOON_MS);
  }
  return repeated;
}

function receive(answer) {
  // A box of a fleet is asked for the whole fleet.
  if (live.scope === "" && live.hasFleetCalls && readFleet(answer.fleet ?? answer.pool.fleet) !== null) {
    home = readPool(answer.pool).node;
    setScope("fleet/");
    return;
  }
  const isFirst = view === null;
  if (pool !== null && pool.serverId !== answer.pool.server_id) history.repeatWithin(0);
  view = answer;
  pool = readPool(answer.pool);
  if (inFull !== null) addDetails(pool, inFull);
  fleet = readFleet(answer.fleet ?? answer.pool.fleet);
  boxes = fleet === null ? null : readBoxes(answer.boxes);
  naming.isFleet = boxes !== null;
  if (pool.node !== null) home = pool.node; // that of a whole fleet names no node
  home ??= boxes?.find((box) => box.url !== null && `${box.url}/`.startsWith(`${location.origin}/`))?.node ?? null;
  pool.node = home;
  setNow(parseTime(answer.now));
  firstVersion ??= answer.version;
  const latest = answer.happened[0]?.at ?? null;
  if (latest !== newest) {
    newest = latest;
    usageToday.repeatWithin(ACCOUNTS_SOON_MS);
    lastHours.repeatWithin(ACCOUNTS_SOON_MS);
  }
  draw();
  if (isFirst) repeatOthers();
}

function setScope(scope) {
  actions.scope = live.scope = scope;
  usageToday.path = `${scope}ui/data/usage`;
  allQuotas.path = `${scope}ui/data/quotas`;
  setSpans();
}

function setSpans() {
  lastHours.path = `${live.scope}ui/data/timeline?hours=${byId("timeline-hours").value}`;
  byWeek.path = `${live.scope}ui/data/weeks?weeks=${byId("weeks-number").value}`;
}

function repeatOthers() {
  if (document.hidden || live.state === "lost" || view === null) return;
  if (gpus.keepsReadings) history.repeatIfDue();
  usageToday.repeatIfDue();
  allQuotas.repeatIfDue();
  lastHours.repeatIfDue();
  repeatOneGpu();
  byWeek.repeatIfDue();
  if (fleet !== null) ownHealth.repeatIfDue();
}

function draw() {
  if (!live.hasFleetCalls && live.scope !== "") setScope("");
  drawConnection();
  if (view === null) return;
  drawnAt = performance.now();
  const own = ownNode();
  const shown = boxesOf(own, boxes);
  attribute(document.body, "data-connection", live.state);
  text(byId("node"), pool.node ?? view.title);
  show(byId("simulated"), pool.source === "simulated");
  text(byId("version"), `GPU Worker Pool ${view.version}`);
  show(byId("docs"), view.docs !== null);
  if (view.docs !== null) attribute(byId("docs").querySelector("a"), "href", view.docs);
  document.title = titleOf();
  tokenDialog.draw(view.has_tokens);
  summary.update(own, shown, fleet === null || ownPart === null ? fleet : { ...fleet, role: ownPart.role, lag_s: ownPart.lag_s });
  gpus.update(shown, access);
  queue.update(own, access, mine, gpus.view === "grid");
  happened.update(view.happened, parseTime(view.started_at), own.clocks);
}

/** A large pool is sent in brief: what the user opens is asked for. */
function askInFull(opened) {
  inFull = null;
  oneGpu.path = opened === null ? "" : `${live.scope}ui/data/gpu?${new URLSearchParams({ node: opened.gpu.node ?? "", uuid: opened.gpu.uuid })}`;
  repeatOneGpu();
}

function repeatOneGpu() {
  if (view.is_brief === true && oneGpu.path !== "") oneGpu.repeatIfDue();
}

/** The queue stands above the grid, because there may be many GPUs; and below the cards. */
function placeQueue(shape) {
  const section = byId("gpus");
  if (shape === "grid") section.before(byId("queue"));
  else section.after(byId("queue"));
}

function ownNode() {
  // While the server does not answer, its clock stands still.
  const viewAgeS = live.state === "lost" ? 0 : serverTimeAgeS();
  const clocks = { nowMs: parseTime(view.now) + viewAgeS * 1000, viewAgeS };
  return { key: "", title: pool.node ?? "this server", url: null, pool, measuredAt: view.measured_at, seenAt: parseTime(view.now) / 1000, clocks };
}

function titleOf() {
  const free = pool.gpus.filter((gpu) => gpu.state === "free").length;
  const state = live.state === "lost" ? "no connection" : `${free} free${pool.queueLength ? `, ${pool.queueLength} waiting` : ""}`;
  return `${state} · ${pool.node ?? view.title}`;
}

const STATES = { connecting: "connecting", live: "live", polling: "polling every few seconds", lost: "no connection" };

function drawConnection() {
  const { state } = live;
  text(byId("connection"), STATES[state]);
  attribute(byId("connection"), "data-state", state);
  if (view === null) {
    arrangeNotices(state === "lost" ? [["lost", "bad", `There is nothing to show: ${live.whyLost}. This page tries again by itself.`]] : []);
    return;
  }
  const ageS = view.reading_age_s === null ? null : view.reading_age_s + serverTimeAgeS();
  text(byId("age"), ageS === null ? "the GPUs have not been read yet" : `measured ${duration(ageS)} ago`);
  // A screen reader reads these when they change, so they state a time and not a duration.
  const seenAt = parseTime(view.now);
  const found = [];
  if (state === "lost") {
    found.push(["lost", "bad", `No connection to the server since ${clock(seenAt)} (${live.whyLost}). The page shows the pool at that time.`]);
  } else if (view.reading_age_s !== null && view.reading_age_s > view.stale_after_s) {
    found.push(["stale", "bad", `The GPUs have not been measured since ${clock(view.measured_at * 1000)}, so none is granted.`]);
  }
  if (pool.trouble !== null) found.push(["trouble", "bad", `No GPU can be granted now: ${pool.trouble}`]);
  if (view.version !== firstVersion) found.push(["version", "warn", `The server is now version ${view.version}: reload this page.`]);
  if (done !== null) found.push(["done", done.kind, done.words]);
  arrangeNotices(found);
}

function arrangeNotices(found) {
  notices.arrange(found.map(([key]) => key)).forEach((notice, i) => notice.update(found[i][1], found[i][2]));
}

class Notice {
  node = el("p", { class: "notice" });

  update(kind, words) {
    attribute(this.node, "data-kind", kind);
    text(this.node, words);
  }
}

function say(kind, words) {
  const shown = { kind, words };
  done = shown;
  drawConnection();
  setTimeout(() => {
    if (done === shown) done = null;
  }, DONE_SHOWN_MS);
}

for (const [id, shown] of [["timeline-hours", lastHours], ["weeks-number", byWeek]]) {
  byId(id).addEventListener("change", () => {
    setSpans();
    shown.repeatIfDue();
  });
}

live.start();
setInterval(() => {
  // Times advance although nothing arrives.
  if (!document.hidden && performance.now() - drawnAt > (gpus.keepsReadings ? REDRAW_AFTER_MS : REDRAW_MANY_AFTER_MS)) draw();
  else if (!document.hidden) drawConnection();
  repeatOthers();
}, 1000);
