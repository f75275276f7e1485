// Chat: base and tuned side by side. The models live in processes of their own, which end when idle.
import { html, useEffect, useRef, useState } from './vendor/vendor.js';
import { ApiError, send, streamed } from './api.js';
import { count, duration } from './format.js';
import { Answer, Bdi, Busy, Command, Exchange, Problem, VerdictWord } from './parts.js';
import { announce, useLoaded } from './parts.js';
import { Link } from './router.js';

/** @type {Record<string, string>} */
const NAMES = { tuned: 'Tuned model', base: 'Base model' };
const POLL_SECONDS = 1.5;

/** @typedef {{ role: string, content: string, seconds?: number, error?: any }} Message */

/** @param {{ session: any, run: any }} own */
export function Chat({ session, run }) {
  const path = `chat?${new URLSearchParams({ id: run.id })}`;
  const [wanted, setWanted] = useState(true);
  const [failure, setFailure] = useState(/** @type {any} */ (null));
  const [isOpening, setOpening] = useState(false);
  const { data, error, again } = useLoaded(path, { every: POLL_SECONDS });
  if (error && !data) return html`<${Problem} error=${error} onRetry=${again} />`;
  if (!data) return html`<${Busy} text="Asking for the models" />`;
  const sides = [...data.sides].sort((a, b) => a.side.localeCompare(b.side));
  const ready = sides.filter((own) => own.status === 'ready');
  const loading = sides.filter((own) => own.status === 'loading');
  const act = async (what, body) => {
    setFailure(null);
    setOpening(true);
    try {
      await send(`chat/${what}`, { id: run.id, ...body });
      again();
    } catch (own) {
      setFailure(own);
    }
    setOpening(false);
  };
  const open = () => act('open', { sides: wanted ? sides.map((own) => own.side) : ['tuned'] });
  const choice = () =>
    html`<label class="states"><input type="checkbox" checked=${wanted} onChange=${({ target }) => setWanted(target.checked)} /> Also the base model, beside it (needs memory for both)</label>`;
  const invitation = () => html`
    <p class="lead">Ask the model before and after training the same question. Loading takes some seconds;
      after ${count(data.idle_minutes, 'minute')} without a question it ends by itself.</p>
    ${session.is_read_only && html`<p class="none">This page was started with <code>--read-only</code>.</p>`}
    ${!session.is_read_only && sides.length > 1 && choice()}
    ${!session.is_read_only && html`<div class="actions"><button type="button" class="primary large" onClick=${open} disabled=${isOpening}>${isOpening ? 'Starting …' : 'Start the chat'}</button></div>`}`;
  return html`<section><div class="title-row"><h2>Chat</h2><${VerdictOf} run=${run} /></div>
    <${Problem} error=${failure} />
    ${data.blocked && html`<${Problem} error=${new ApiError(409, data.blocked)} onRetry=${again} />`}
    ${sides.map((own) => own.status === 'failed' && own.error && html`<${Problem} title=${`The ${NAMES[own.side].toLowerCase()} does not load`} error=${new ApiError(400, own.error)} />`)}
    ${!ready.length && !loading.length && !data.blocked && invitation()}
    ${loading.length > 0 && html`<${Busy} text=${`Loading the ${loading.map((own) => NAMES[own.side].toLowerCase()).join(' and the ')}`} />`}
    ${ready.length > 0 && !loading.length && html`<${Talk} run=${run} sides=${ready} /><button type="button" onClick=${() => act('close', {})}>End the chat and free the memory</button>`}
    ${sides.map((own) => html`<${Command} label=${`${NAMES[own.side]} in a terminal`} command=${own.command} />`)}
  </section>`;
}

/** The verdict beside the chat: a model can sound right and be wrong. @param {{ run: any }} own */
function VerdictOf({ run }) {
  const to = { screen: 'run', id: run.id, tab: 'verdict' };
  return html`<p class="states"><${VerdictWord} level=${run.verdict} /> <${Link} to=${to}>${run.verdict ? 'why' : 'no verdict yet'}<//></p>`;
}

/** The questions and the answers of both sides, as they are written. @param {{ run: any, sides: any[] }} own */
function Talk({ run, sides }) {
  const [talks, setTalks] = useState(/** @type {Record<string, any[]>} */ ({}));
  const [isBusy, setBusy] = useState(false);
  const controller = useRef(new AbortController());
  const field = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  useEffect(() => {
    field.current?.focus({ preventScroll: true });
    return () => controller.current.abort();
  }, []);

  /** Change the last message of a side. @param {string} side @param {(last: Message) => Message} change */
  const edit = (side, change) =>
    setTalks((old) => ({ ...old, [side]: old[side].with(-1, change(old[side].at(-1))) }));

  const answer = async (side, /** @type {Message[]} */ messages) => {
    const own = messages.map(({ role, content }) => ({ role, content }));
    try {
      const body = { id: run.id, side, messages: own, temperature: 0 };
      for await (const { name, data } of streamed('chat/say', body, controller.current.signal)) {
        const more = ({ content }) => (name === 'delta' ? { content: content + data.text } : data);
        edit(side, (last) => ({ ...last, ...more(last) }));
      }
    } catch (error) {
      if (!controller.current.signal.aborted) edit(side, (last) => ({ ...last, error }));
    }
  };
  const ask = async (event) => {
    event.preventDefault();
    const text = field.current?.value.trim() ?? '';
    if (!text || isBusy || !field.current) return;
    field.current.value = '';
    controller.current = new AbortController();
    setBusy(true);
    const bySide = (make) => Object.fromEntries(sides.map(({ side }) => [side, make(side)]));
    const asked = bySide((side) => [...(talks[side] ?? []), { role: 'user', content: text }]);
    setTalks(bySide((side) => [...asked[side], { role: 'assistant', content: '' }]));
    await Promise.all(sides.map(({ side }) => answer(side, asked[side])));
    setBusy(false);
    announce('Answered');
    field.current?.focus({ preventScroll: true });
  };
  const key = (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) ask(event);
  };
  const turns = Math.max(0, ...sides.map(({ side }) => talks[side]?.length ?? 0)) / 2;
  const one = (_, turn) => html`
    <${Exchange} question=${talks[sides[0].side]?.[2 * turn]?.content} key=${turn}>
    ${sides.map(({ side, name }) => reply(side, name, talks[side]?.[2 * turn + 1], isBusy && turn === Math.ceil(turns) - 1))}<//>`;
  return html`${Array.from({ length: Math.ceil(turns) }, one)}
    <form class="ask" onSubmit=${ask}>
      <label for="ask">Your question</label>
      <textarea id="ask" ref=${field} rows="2" onKeyDown=${key} dir="auto"></textarea>
      <div class="actions"><button class="primary" disabled=${isBusy}>Ask</button>
        ${isBusy && html`<button type="button" onClick=${() => controller.current.abort()}>Stop</button>`}
        ${turns > 0 && !isBusy && html`<button type="button" onClick=${() => setTalks({})}>Start anew</button>`}</div>
    </form>`;
}

/** The reply of a side, as far as it is written. @param {string} side @param {string} model @param {Message} [message] @param {boolean} [isLast] */
function reply(side, model, message, isLast) {
  const { content = '', error, seconds } = message ?? {};
  const name = html`${NAMES[side]} <${Bdi} text=${model} />`;
  const hint = seconds !== undefined && duration(seconds);
  const busy = !content && isLast ? html`<${Busy} text="Thinking" />` : undefined;
  const instead = error ? html`<${Problem} error=${error} />` : busy;
  return html`<${Answer} name=${name} text=${content} hint=${hint} side=${side} key=${side}>${instead}<//>`;
}
