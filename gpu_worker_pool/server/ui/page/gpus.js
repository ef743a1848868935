// The GPUs: a row for each, or a square for each where there are many; and one GPU in full.

import { gpuWords, leftWords, plansOf, stateWord } from "./facts.js";
import { Clamped, Curve, EndButton, Meter, Owner, Text } from "./parts.js";
import { html, useRef } from "./vendor/preact.js";
import { duration, END_REASONS, gpuName, gpuNames, holderName, memory, NONE, otherLabels, percent, plain, plural, power, runs, shortModel, temperature, UNKNOWN } from "./words.js";

/** More GPUs than this are squares. */
export const MOST_ROWS = 32;

/** `gpus` are those that the filter has found. */
export function Rows({ page, gpus }) {
  const { view } = page;
  const models = new Set(view.pool.gpus.map((gpu) => gpu.name));
  const one = models.size === 1 ? ` · ${plural(view.pool.gpus.length, "GPU")}, ${shortModel([...models][0])}` : "";
  return html`<table class="rows" aria-label="GPUs">
    <colgroup><col class="index" /><col class="state" /><col class="load wide" /><col class="load wide" /><col /><col class="wide" /><col class="since wide" /><col
      class="left" /><col class="do" /></colgroup>
    <thead><tr>
      <th scope="col" colspan="2"><span class="clamped">GPU${one}</span></th><th scope="col" class="wide">memory</th><th scope="col" class="wide">utilization</th>
      <th scope="col">holder</th><th scope="col" class="wide">runs</th><th scope="col" class="number wide">since</th><th scope="col" class="number">left</th><th
        scope="col"><span class="hidden">actions</span></th>
    </tr></thead>
    ${view.boxes.map((box) => {
      const own = gpus.filter((gpu) => !view.isFleet || gpu.node === box.node);
      return own.length > 0 && html`<tbody key=${box.node}>
        ${view.isFleet && html`<tr class="box"><th colspan=${page.isNarrow ? 5 : 9} scope="rowgroup"><${BoxName} box=${box} /></th></tr>`}
        ${own.map((gpu, i) => html`<${Row} key=${gpu.key} gpu=${gpu} before=${own[i - 1]} page=${page} hasModel=${models.size > 1} />`)}
      </tbody>`;
    })}
  </table>`;
}

function Row({ gpu, before, page, hasModel }) {
  const { view, url, go, nowMs, owner } = page;
  const isOpen = url.gpu === gpu.key;
  const [lease] = gpu.holders;
  const isMine = (one) => owner !== null && one.owner === owner;
  // A lease of several GPUs is told once.
  const isSame = lease !== undefined && gpu.holders.length === 1 && before?.holders.length === 1 && before.holders[0] === lease;
  const isKnown = gpu.kind !== "unknown" && gpu.kind !== "off";
  const idle = gpu.holders.find((one) => one.idle_s !== null);
  const plan = plansOf(gpu, view.pool, nowMs)[0];
  return html`<tr data-kind=${gpu.kind} data-state=${gpu.state} data-mine=${gpu.holders.some(isMine) || null} aria-label=${gpuName(gpu)}>
      <th scope="row"><button type="button" class="number-of" aria-expanded=${String(isOpen)} aria-label=${plain(gpuWords(gpu, view.isFleet))}
        onClick=${() => go({ gpu: isOpen ? "" : gpu.key })}>${gpu.gpu_id ?? "?"}</button></th>
      <td class="state"><span
        class="badge">${idle === undefined ? stateWord(gpu.state) : `idle ${duration(idle.idle_s)}`}${gpu.holders.length > 1 ? ` ${gpu.holders.length}` : ""}</span>${hasModel && html` <span class="quiet wide">${shortModel(gpu.name)}</span>`}</td>
      <td class="wide"><${Meter} label="Memory" value=${gpu.memory_percent} words=${memory(gpu.used_mb)} threshold=${view.pool.memoryThreshold} /> <span
        class="value">${gpu.used_mb === null ? UNKNOWN : `${memory(gpu.used_mb)}`}</span></td>
      <td class="wide">${isKnown && html`<${Curve} readings=${page.readings.of(gpu.key)} width=${80} height=${16}
        label=${`Utilization: ${percent(gpu.utilization_percent)}`} kinds=${["utilization"]} />`} <span class="value">${percent(gpu.utilization_percent)}</span></td>
      ${lease === undefined && html`<td colspan=${page.isNarrow ? 3 : 5}><${Clamped} className="quiet"
        text=${gpu.kind === "free" ? (plan === undefined ? "" : plain(plan)) : gpu.reason} /></td>`}
      ${lease !== undefined && html`
        <td>${gpu.holders.slice(0, 3).map((one) => html`<${Owner} key=${one.id} lease=${one} isMine=${isMine(one)} /> `)}${isSame && html`<span
          class="quiet">same lease</span>`}</td>
        <td class="wide">${!isSame && html`<${Clamped} text=${gpu.holders.map(runs).filter(Boolean).join(", ")} />`}</td>
        <td class="number wide">${!isSame && duration((nowMs - lease.granted_at) / 1000)}</td>
        <td class="number left" data-warned=${lease.warning ? "" : null}>${lease.state === "active" && !isSame && leftWords(lease, view, nowMs)}</td>
        <td class="do">${gpu.holders.length === 1 && !isSame && html`<${EndButton} lease=${lease} page=${page} />`}</td>`}
    </tr>
    ${isOpen && html`<tr class="in-full"><td colspan=${page.isNarrow ? 5 : 9}><${InFull} gpu=${gpu} page=${page} /></td></tr>`}`;
}

function BoxName({ box }) {
  const free = box.gpus.filter((gpu) => gpu.kind === "free").length;
  const about = box.isUnknown ? "silent" : free === 0 ? "full" : `${free} free`;
  return html`<span class="box-name"><bdi title=${box.node}>${box.node ?? "this box"}</bdi>${box.isLeader && html` <span class="leads"
    title="leads the fleet">leads</span>`}
    <span class="quiet"> ${about}</span></span>`;
}

/** The boxes by model, those with free GPUs first; a square is a GPU. */
export function Squares({ page, gpus }) {
  const { view, url } = page;
  const ref = useRef(null);
  const shown = new Set(gpus);
  const groups = new Map();
  for (const box of view.boxes) {
    const own = box.gpus.filter((gpu) => shown.has(gpu));
    if (own.length === 0) continue;
    const model = own[0].name;
    groups.set(model, [...(groups.get(model) ?? []), { box, own }]);
  }
  const freeOf = ({ own }) => own.filter((gpu) => gpu.kind === "free").length;
  const current = gpus.find((gpu) => gpu.key === url.gpu) ?? gpus[0];
  const opened = gpus.find((gpu) => gpu.key === url.gpu);
  const isOneBox = view.boxes.length === 1;
  return html`<div class="squares" ref=${ref} role="group" aria-label="GPUs" onKeyDown=${(event) => moveFocus(event, ref.current)}>
      ${[...groups].map(([model, boxes]) => html`<div key=${model} class="model" role="group" aria-label=${shortModel(model)}>
        <h2><${Clamped} text=${shortModel(model)} /></h2>
        <div class="boxes" data-one=${isOneBox || null}>${boxes.sort((a, b) => freeOf(b) - freeOf(a)).map(({ box, own }) => html`<div class="box" key=${box.node}
          data-silent=${box.isUnknown || null}>
          ${!isOneBox && html`<${BoxName} box=${box} />`}
          <div class="line">${own.map((gpu, i) => html`<${Square} key=${gpu.key} gpu=${gpu} before=${own[i - 1]} page=${page}
            isCurrent=${gpu === current} />`)}</div>
        </div>`)}</div>
      </div>`)}
    </div>
    ${opened !== undefined && html`<div class="in-full" role="region" aria-label="One GPU"><${InFull} gpu=${opened} page=${page} /></div>`}`;
}

function Square({ gpu, before, page, isCurrent }) {
  const { view, url, go, owner, nowMs } = page;
  const [lease] = gpu.holders;
  const isMine = gpu.holders.some((one) => owner !== null && one.owner === owner);
  const idle = gpu.holders.find((one) => one.idle_s !== null);
  const words = [
    plain(gpuWords(gpu, view.isFleet)),
    stateWord(gpu.state),
    gpu.holders.map(holderName).join(", "),
    isMine ? "yours" : "",
    lease !== undefined && lease.nodes.length > 1 ? `one lease over ${lease.nodes.length} boxes` : "",
    idle === undefined ? "" : `idle for ${duration(idle.idle_s)}`,
    lease?.state === "active" && leftWords(lease, view, nowMs) !== NONE ? `${leftWords(lease, view, nowMs)} left` : "",
    gpu.utilization_percent === null ? "" : `utilization ${percent(gpu.utilization_percent)}`,
  ];
  const label = words.filter(Boolean).join(", ");
  return html`<button type="button" class="square" data-kind=${gpu.kind} data-state=${gpu.state} data-mine=${isMine || null} data-idle=${idle !== undefined || null}
    data-joined=${(lease !== undefined && before?.holders[0] === lease) || null}
    aria-label=${label} title=${label} aria-expanded=${String(url.gpu === gpu.key)} tabindex=${isCurrent ? 0 : -1}
      onClick=${() => go({ gpu: url.gpu === gpu.key ? "" : gpu.key })}>${gpu.kind === "unknown" ? "?" : ""}</button>`;
}

const STEPS = {
  ArrowRight: (squares, at) => squares[at + 1],
  ArrowLeft: (squares, at) => squares[at - 1],
  ArrowDown: (squares, at) => nearest(squares, at, (top, own) => top > own + 1),
  ArrowUp: (squares, at) => nearest(squares, at, (top, own) => top < own - 1),
  Home: (squares) => squares[0],
  End: (squares) => squares.at(-1),
};

/** The nearest square of the next line, up or down. */
function nearest(squares, at, isBeyond) {
  const from = squares[at].getBoundingClientRect();
  const places = squares.map((square) => ({ square, box: square.getBoundingClientRect() })).filter(({ box }) => isBeyond(box.top, from.top));
  const far = ({ box }) => Math.abs(box.top - from.top) * 1000 + Math.abs(box.left - from.left);
  return places.sort((a, b) => far(a) - far(b))[0]?.square;
}

/** The arrow keys go from square to square. */
function moveFocus(event, root) {
  const squares = [...root.querySelectorAll(".square")];
  const at = squares.indexOf(event.target);
  if (at < 0 || !Object.hasOwn(STEPS, event.key) || event.altKey || event.metaKey) return;
  event.preventDefault();
  const to = STEPS[event.key](squares, at);
  if (to === undefined) return;
  for (const square of squares) square.tabIndex = square === to ? 0 : -1;
  to.focus();
}

/** All that is known of a GPU, with what may be done to it. */
function InFull({ gpu, page }) {
  const { view, nowMs, me, isConnected, open, go, readings } = page;
  const { pool } = view;
  const kept = readings.of(gpu.key);
  const spanS = kept.length < 2 ? 0 : kept.at(-1).at - kept[0].at;
  const plans = plansOf(gpu, pool, nowMs);
  const box = view.boxes.find((each) => each.gpus.includes(gpu));
  const drain = pool.bookings.find((booking) => booking.isDrain && booking.gpus.some((one) => one.uuid === gpu.uuid));
  const facts = [
    ["Memory", gpu.memory_percent === null ? memory(gpu.used_mb) : `${memory(gpu.used_mb)} of ${memory(gpu.total_mb)}, ${percent(gpu.memory_percent)}`],
    ["Utilization", percent(gpu.utilization_percent)],
    ["Temperature", temperature(gpu.temperature_c)],
    ["Power", power(gpu.power_draw_w)],
  ];
  return html`<div class="details" onKeyDown=${(event) => event.key === "Escape" && go({ gpu: "" })}>
    <div>
      <h2><${Text} parts=${gpuWords(gpu, view.isFleet)} /> <${Clamped} className="quiet" text=${gpu.name ?? "model unknown"} /></h2>
      <p class="reason"><span class="badge" data-kind=${gpu.kind}>${stateWord(gpu.state)}</span> ${gpu.holders.length === 0 && html`<bdi>${gpu.reason}</bdi>`}</p>
      <dl>${facts.map(([word, value]) => html`<div><dt>${word}</dt><dd>${value}</dd></div>`)}</dl>
      ${spanS > 0 && html`<${Curve} readings=${kept} width=${300} height=${48} kinds=${["memory", "utilization"]}
        label=${`The last ${duration(spanS)}: memory and utilization`} /><p class="quiet">memory and utilization of the last ${duration(spanS)}</p>`}
    </div>
    <div>
      <ul class="holders" aria-label="Holders">${gpu.holders.map((lease) => html`<${Holder} key=${lease.id} lease=${lease} page=${page} />`)}</ul>
      ${plans.length > 0 && html`<ul aria-label="Plans">${plans.map((plan) => html`<li><${Text} parts=${plan} /></li>`)}</ul>`}
      <ul class="quiet" aria-label="Outside the pool">${outsideLines(gpu).map((line) => html`<li>${line}</li>`)}</ul>
    </div>
    <p class="buttons">
      ${me?.isOperator && isConnected && (gpu.isOutOfService || drain !== undefined
        ? html`<button type="button"
          onClick=${() => open({ kind: "undrain", gpus: [gpu], drain })}>${gpu.isOutOfService ? "Put back into service" : "Cancel planned drain"}</button>`
        : html`<button type="button" onClick=${() => open({ kind: "drain", gpus: [gpu] })}>Drain ${gpuName(gpu)}…</button>`)}
      ${me?.isOperator && isConnected && html`<button type="button" onClick=${() => open({ kind: "drain", gpus: box.gpus, box })}>Drain the box…</button>`}
      <button type="button" onClick=${() => go({ gpu: "" })}>Close</button>
    </p>
  </div>`;
}

function Holder({ lease, page }) {
  const { view, nowMs, owner } = page;
  const isLive = lease.state === "active";
  const ended = `${END_REASONS[lease.end_reason] ?? "ended"} ${duration((nowMs - lease.ended_at) / 1000)} ago; still on the GPU`;
  const terms = [
    isLive ? `for ${duration((nowMs - lease.granted_at) / 1000)}` : ended,
    isLive && leftWords(lease, view, nowMs) !== NONE ? `${leftWords(lease, view, nowMs)} left` : "",
    lease.wishes.preemptible ? "preemptible" : "",
    lease.idle_s === null ? "" : `idle ${duration(lease.idle_s)}`,
    lease.nodes.length > 1 ? `one lease over ${plural(lease.nodes.length, "box", "boxes")}: ${gpuNames(lease.gpus, true)}` : lease.gpus.length > 1 ? `one lease: ${gpuNames(lease.gpus, false)}` : "",
  ];
  return html`<li><${Owner} lease=${lease} isMine=${owner !== null && lease.owner === owner} /> <bdi>${runs(lease)}</bdi> <span
    class="quiet">${terms.filter(Boolean).join(", ")}</span> <bdi class="quiet">${otherLabels(lease.labels)}</bdi>
    <${EndButton} lease=${lease} page=${page} /></li>`;
}

const MOST_PROCESSES = 8;
// Less memory than this without a process belongs to the driver.
const WORTH_A_LINE_MB = 1024;

/** The processes without a lease, as far as they are known. */
function outsideLines(gpu) {
  const isMuch = gpu.outside_mb !== null && gpu.outside_mb >= WORTH_A_LINE_MB;
  if (gpu.processes === null) return isMuch ? [`outside the pool: ${memory(gpu.outside_mb)}, by processes that cannot be seen`] : [];
  // A process may belong to an exclusive lease that named no process. Then only much memory is worth a line.
  const worth = gpu.processes.filter((process) => process.isIgnored || process.isOutside === true || (process.isOutside === null && isMuch));
  const lines = worth.slice(0, MOST_PROCESSES).map((process) => {
    const kind = process.isIgnored ? "not counted" : process.isOutside ? "outside the pool" : "of the lease or outside";
    return `${kind}: ${process.user ? `${process.user}, ` : ""}${process.name ?? "a process"} (pid ${process.pid ?? UNKNOWN}), ${memory(process.used_mb)}`;
  });
  return worth.length > MOST_PROCESSES ? [...lines, `and ${worth.length - MOST_PROCESSES} more`] : lines;
}
