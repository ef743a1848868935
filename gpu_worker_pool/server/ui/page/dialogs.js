// What the user can do: each in a dialog that says what will happen. Nothing is done before it is confirmed.

import { modelsOf, startWords } from "./facts.js";
import { Text } from "./parts.js";
import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { clock, duration, END_REASONS, gpuNames, holderName, memory, name, plain, runCommand, say } from "./words.js";

/** The dialog that is open; `page.dialog` says which, and what it is about. */
export function Dialog({ page }) {
  const ref = useRef(null);
  const { dialog } = page;
  useEffect(() => {
    ref.current.showModal();
    // The focus is not on the main button where nothing is to be typed: Enter must not confirm a mistake.
    (ref.current.querySelector("[data-first]") ?? ref.current.querySelector(".cancel")).focus({ preventScroll: true });
  }, []);
  const Body = { login: Login, get: Get }[dialog.kind] ?? Confirm;
  return html`<dialog ref=${ref} aria-labelledby="dialog-title" onClose=${() => page.close(dialog)}>
    <${Body} page=${page} ...${dialog} isOpen=${() => ref.current?.open === true} close=${() => ref.current?.close()} />
  </dialog>`;
}

/** An action that changes something: its words, its fields, its call. */
function Confirm({ page, isOpen, close, ...about }) {
  const [plan] = useState(() => PLANS[about.kind](about, page));
  const [values, setValues] = useState(plan.values ?? {});
  const [error, setError] = useState("");
  const [isAsking, setAsking] = useState(false);
  async function submit(event) {
    event.preventDefault();
    setError("");
    setAsking(true);
    try {
      const answer = await plan.call(values);
      page.say("good", plan.done(answer));
      if (isOpen()) close();
    } catch (refused) {
      // When the answer comes, the dialog may be closed.
      if (isOpen()) setError(refused.message);
      else page.say("bad", [...plan.title, " ", refused.message]);
    }
    setAsking(false);
  }
  const set = (field) => (event) => setValues({ ...values, [field]: event.target.value });
  return html`<form onSubmit=${submit}>
    <h2 id="dialog-title"><${Text} parts=${plan.title} /></h2>
    <ul>${plan.lines.map((line) => html`<li><${Text} parts=${line} /></li>`)}</ul>
    ${(plan.fields ?? []).map((field, i) => html`<label key=${field.name}>${field.label}
      ${field.options
        ? html`<select value=${values[field.name]} onChange=${set(field.name)}>${field.options.map(([value, words]) => html`<option value=${value}
          selected=${value === values[field.name]}>${words}</option>`)}</select>`
        : html`<input type=${field.type ?? "text"} min=${field.min} max=${field.max} required=${field.isRequired} maxlength="200" autocomplete="off"
          data-first=${(i === 0 && plan.isTyped) || null} value=${values[field.name]} onInput=${set(field.name)} />`}
    </label>`)}
    <p class="error" role="alert">${error}</p>
    <div class="buttons"><button type="submit" class=${plan.isHarmless ? "main" : "main danger"} disabled=${isAsking || !page.isConnected}>${plan.yes}</button>
      <button type="button" class="cancel" onClick=${close}>Cancel</button></div>
  </form>`;
}

const REASON = { name: "reason", label: "Reason, shown to all users" };

/** The time as the field of a date and time has it, in the user's time zone. */
const localTime = (ms) => {
  const at = new Date(ms);
  return new Date(ms - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
};
const isoTime = (local) => new Date(local).toISOString();
const asQuery = (reason) => (reason ? `?${new URLSearchParams({ reason })}` : "");

async function eachInTurn(things, call) {
  let answer = null;
  for (const thing of things) answer = await call(thing);
  return answer;
}

/** By the kind of the dialog: its words, its fields, the call and what is said after it. */
const PLANS = {
  end({ leases: [lease] }, page) {
    const who = name(holderName(lease));
    const isOwn = page.me.name !== null && lease.owner === page.me.name;
    const which = gpuNames(lease.gpus, page.view.isFleet);
    const id = encodeURIComponent(lease.id);
    return {
      title: say`End the lease of ${who} on ${name(which)}?`,
      lines: [say`The lease ${name(lease.id)} of ${who} ends.`, ...consequences(lease, page)],
      fields: [REASON],
      values: { reason: "" },
      yes: "End the lease",
      call: ({ reason }) =>
        isOwn ? page.call(`leases/${id}${asQuery(reason)}`, { method: "DELETE" }) : page.call(`admin/leases/${id}/revoke${asQuery(reason)}`, { method: "POST" }),
      done: (answer) =>
        answer.end_reason === (isOwn ? "released" : "revoked") ? say`The lease of ${who} on ${name(which)} is ended.` : say`The lease of ${who} ${endedAlready(answer)}`,
    };
  },
  leave({ leases }, page) {
    const [lease] = leases;
    const who = name(holderName(lease));
    const requests = say`${leases.length > 1 ? "The requests" : "The request"} ${name(leases.map((each) => each.id).join(", "))} of ${who}`;
    const are = leases.length > 1 ? "are" : "is";
    return {
      title: say`Take ${who} out of the queue?`,
      lines: [
        say`${requests}, from position ${lease.position ?? "unknown"}, ${are} cancelled.`,
        "The waiter learns that its request ended. A new request starts at the end of the queue.",
      ],
      yes: "Take out",
      call: () => eachInTurn(leases, (each) => page.call(`leases/${encodeURIComponent(each.id)}`, { method: "DELETE" })),
      done: (answer) => (answer.end_reason === "cancelled" ? say`${requests} ${are} out of the queue.` : say`${requests} ${endedAlready(answer)}`),
    };
  },
  drain({ gpus, box }, page) {
    const which = box === undefined ? gpuNames(gpus, page.view.isFleet) : `all GPUs of ${box.node ?? "this box"}`;
    const holders = [...new Set(gpus.flatMap((gpu) => gpu.holders))].filter((lease) => lease.state === "active");
    return {
      title: say`Take ${name(which)} out of service?`,
      lines: [
        say`${name(which)} ${gpus.length === 1 ? "is" : "are"} not granted until put back, also after a restart of the server.`,
        holders.length ? say`${name(holders.map(holderName).join(", "))} may keep what they have until the lease ends.` : "No lease is there now.",
      ],
      fields: [REASON, { name: "at", label: "From (empty: now)", type: "datetime-local" }],
      values: { reason: "", at: "" },
      isTyped: true,
      yes: "Drain",
      call: ({ reason, at }) => eachInTurn(gpus, (gpu) => page.call(`admin/gpus/${gpuInPath(gpu, page)}/drain`, { method: "POST", body: at === "" ? { reason } : { reason, at: isoTime(at) } })),
      done: () => say`${name(which)}: out of service, or planned to be.`,
    };
  },
  undrain({ gpus, drain }, page) {
    const which = gpuNames(gpus, page.view.isFleet);
    const isPlanned = drain !== undefined && !gpus[0].isOutOfService;
    return {
      title: isPlanned ? say`Cancel the planned drain of ${name(which)}?` : say`Put ${name(which)} back into service?`,
      lines: [isPlanned ? say`${name(which)} stays in service.` : say`${name(which)} is granted to the next waiter as soon as its readings allow.`],
      isHarmless: true,
      yes: isPlanned ? "Cancel the drain" : "Put back",
      call: () => eachInTurn(gpus, (gpu) => page.call(`admin/gpus/${gpuInPath(gpu, page)}/undrain`, { method: "POST" })),
      done: () => (isPlanned ? say`No drain of ${name(which)} is planned.` : say`${name(which)} is back in service.`),
    };
  },
  book({ gpus, from, to }, page) {
    const { nowMs, view, me } = page;
    const begin = from ?? Math.ceil(nowMs / 3_600_000) * 3_600_000;
    const isAny = gpus.length === 0;
    const which = isAny ? "GPUs" : gpuNames(gpus, view.isFleet);
    const any = [
      { name: "gpus", label: "How many, all on one box", type: "number", min: 1, isRequired: true },
      { name: "model", label: "Model", options: [["", "any"], ...modelsOf(view).map((each) => [each.model ?? "", each.title])] },
    ];
    const times = [
      { name: "from", label: "From", type: "datetime-local", isRequired: true },
      { name: "to", label: "To", type: "datetime-local", isRequired: true },
    ];
    const whose = me.isOperator ? [{ name: "owner", label: "For" }] : [];
    return {
      title: say`Book ${name(which)}?`,
      lines: [say`In that time ${isAny ? "they are" : name(`${which} ${gpus.length === 1 ? "is" : "are"}`)} granted to ${me.isOperator ? "the owner that you name" : "you"} only.`],
      fields: [...(isAny ? any : []), ...times, REASON, ...whose],
      values: { gpus: String(gpus.length || 1), model: "", from: localTime(begin), to: localTime(to ?? begin + 2 * 3_600_000), reason: "", owner: me.name ?? "" },
      isTyped: true,
      isHarmless: true,
      yes: "Book",
      call: (values) => {
        const wishes = isAny ? { gpus: Number(values.gpus), ...(values.model ? { model: values.model } : {}) } : { gpus: gpus.length, among: gpus.map((gpu) => gpu.uuid) };
        const span = { starts_at: isoTime(values.from), ends_at: isoTime(values.to), reason: values.reason };
        return page.call(`bookings/${newId()}`, { method: "PUT", body: { ...wishes, ...span, ...(values.owner && me.isOperator ? { owner: values.owner } : {}) } });
      },
      done: (answer) => say`${name(gpuNames(answer.gpus, view.isFleet))} booked for ${name(answer.owner ?? "")} from ${clock(Date.parse(answer.starts_at), nowMs)}.`,
    };
  },
  unbook({ booking }, page) {
    const which = gpuNames(booking.gpus, page.view.isFleet);
    return {
      title: say`Cancel the booking of ${name(which)} for ${name(booking.owner ?? "nobody")}?`,
      lines: [say`From ${clock(booking.starts_at, page.nowMs)} to ${clock(booking.ends_at, page.nowMs)}${booking.reason === "" ? [] : [": ", name(booking.reason)]}. Others may have the GPUs then.`],
      yes: "Cancel the booking",
      call: () => page.call(`bookings/${encodeURIComponent(booking.id)}`, { method: "DELETE" }),
      done: () => say`The booking of ${name(which)} is cancelled.`,
    };
  },
};

const gpuInPath = (gpu, page) => encodeURIComponent(page.view.isFleet ? `${gpu.node}:${gpu.uuid}` : gpu.uuid);

const endedAlready = (answer) => `had ended already: ${END_REASONS[answer.end_reason] ?? answer.end_reason}.`;

/** An id that no other booking has; also where the connection is not encrypted, and the browser makes no UUID. */
const newId = () => `page-${[...crypto.getRandomValues(new Uint32Array(3))].map((part) => part.toString(36)).join("")}`;

function consequences(lease, { view, nowMs }) {
  const { pool, isFleet } = view;
  const held = Number.isFinite(lease.granted_at) ? `It was held for ${duration((nowMs - lease.granted_at) / 1000)}.` : null;
  const uuids = new Set(lease.gpus.map((gpu) => gpu.uuid));
  const used = pool.gpus.filter((gpu) => uuids.has(gpu.uuid) && gpu.used_mb !== null).map((gpu) => `${gpuNames([gpu], isFleet)} has ${memory(gpu.used_mb)} in use`);
  const [next] = pool.queue;
  return [
    held,
    "gpu-pool run ends its command at once. Any other holder learns of it with its next heartbeat; the server does not stop its program.",
    used.length ? `${used.join(", ")}; the GPU drains while that memory is in use.` : null,
    next === undefined ? "Nobody waits." : say`Next in the queue: ${name(holderName(next))}.`,
  ].filter((line) => line !== null);
}

/** Who the user is, by a token that is kept for this tab. */
function Login({ page, isOpen, close }) {
  const [error, setError] = useState("");
  const input = useRef(null);
  async function submit(event) {
    event.preventDefault();
    const token = input.current.value.trim();
    setError("");
    // A header cannot carry other characters, and the browser's own error would not say so.
    if (!/^[!-~]+$/.test(token)) {
      setError("The token must be visible ASCII characters only, without blanks.");
      return;
    }
    try {
      const isAccepted = await page.logIn(token, isOpen);
      if (isAccepted) close();
    } catch (refused) {
      if (isOpen()) setError(refused.message);
    }
  }
  const isPlain = location.protocol === "http:" && !/^(localhost|.*\.localhost|\[::1\]|127(\.[0-9]+){3})$/.test(location.hostname);
  return html`<form onSubmit=${submit}>
    <h2 id="dialog-title">Log in with a token</h2>
    <p>With a token you can book GPUs, end your own leases and leave the queue. One of the role operator or administrator may also end those of others
      and take GPUs out of service. It is kept for this tab, until you close it or log out.</p>
    ${isPlain && html`<p class="notice" data-kind="warn">This connection is not encrypted: others on the network can read the token.</p>`}
    <p class="quiet">${page.view?.hasTokens === false ? "This server has no tokens yet. " : ""}Its administrator makes one with: gpu-pool token add NAME</p>
    <label>Token <input ref=${input} type="password" autocomplete="off" spellcheck="false" required data-first="" /></label>
    <p class="error" role="alert">${error}</p>
    <div class="buttons"><button type="submit" class="main">Log in</button><button type="button" class="cancel" onClick=${close}>Cancel</button></div>
  </form>`;
}

/** Composes the command that asks for GPUs, with what it may expect. The page runs no jobs: they are the user's own processes. */
function Get({ page, close }) {
  const { view, nowMs } = page;
  const models = modelsOf(view);
  const [wishes, setWishes] = useState({ gpus: 1, model: "", memoryGb: "", time: "", command: "" });
  const set = (field) => (event) => setWishes({ ...wishes, [field]: event.target.value });
  const command = runCommand({ ...wishes, gpus: Number(wishes.gpus) || 1, model: models.find((each) => each.model === wishes.model)?.title.split(" ")[0] ?? "" });
  const asked = models.filter((each) => wishes.model === "" || each.model === wishes.model);
  const starts = asked.map((each) => ({ title: each.title, one: startWords(each.starts, nowMs).find(({ gpus }) => gpus >= Number(wishes.gpus)) })).filter(({ one }) => one !== undefined);
  return html`<form onSubmit=${(event) => event.preventDefault()}>
    <h2 id="dialog-title">Get a GPU</h2>
    <p>Run this on the box, or where the pool's address is set. It waits for the GPU, runs the command on it, and gives it back.</p>
    <div class="fields">
      <label>GPUs <input type="number" min="1" max="1024" data-first="" value=${wishes.gpus} onInput=${set("gpus")} disabled=${wishes.memoryGb !== ""} /></label>
      <label>Model <select value=${wishes.model} onChange=${set("model")}><option value="">any</option>${models.map((each) => html`<option
        value=${each.model}>${each.title}</option>`)}</select></label>
      <label>Share, GB of memory <input type="number" min="1" placeholder="alone" value=${wishes.memoryGb} onInput=${set("memoryGb")} /></label>
      <label>Time limit <input type="text" placeholder="none; 2h starts sooner" value=${wishes.time} onInput=${set("time")} /></label>
      <label class="whole">Command <input type="text" placeholder="python train.py" value=${wishes.command} onInput=${set("command")} /></label>
    </div>
    ${wishes.memoryGb === "" && starts.length > 0 && html`<p>Ask now: ${starts.map(({ title, one }) => `${title} ${one.words}`).join(" · ")}</p>`}
    <p class="command">${command}</p>
    <div class="buttons"><button type="button" class="main" onClick=${() => page.copy(command, "the command")}>Copy</button><button type="button" class="cancel"
      onClick=${close}>Close</button></div>
    <p role="status" class="quiet">${page.done === null ? "" : plain(page.done.words)}</p>
  </form>`;
}
