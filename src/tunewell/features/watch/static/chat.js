// Chat: base and tuned side by side. The models live in processes of their own, which end when idle.
import { html, useEffect, useRef, useState } from './vendor/vendor.js';
import { ApiError, send, streamed } from './api.js';
import { count, duration, visible } from './format.js';
import { Bdi, Busy, Command, Problem, Said, VerdictWord, announce, sentence } from './parts.js';
import { useLoaded } from './parts.js';
import { Link } from './router.js';

/** @type {Record<string, string>} */
const NAMES = { tuned: 'Tuned model', base: 'Base model' };
const POLL_SECONDS = 1.5;

/** @typedef {{ role: string, content: string, seconds?: number, tokens?: number, error?: any }} Message */

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
  const hasBase = sides.some((own) => own.side === 'base');
  return html`<section><div class="title-row"><h2>Chat</h2><${VerdictOf} run=${run} /></div>
    <${Problem} error=${failure} />
    ${data.blocked && html`<${Problem} error=${new ApiError(409, data.blocked)} onRetry=${again} />`}
    ${sides.map((own) => own.status === 'failed' && own.error && html`<${Problem} title=${`The ${NAMES[own.side].toLowerCase()} does not load`} error=${new ApiError(400, own.error)} />`)}
    ${!ready.length && !loading.length && !data.blocked && html`<p class="lead">Ask the model before and after training the same question. Loading takes some seconds; after ${count(data.idle_minutes, 'minute')} without a question it ends by itself.</p>
      ${session.is_read_only ? html`<p class="none">This page was started with <code>--read-only</code>.</p>` : html`
        ${hasBase && html`<label class="check"><input type="checkbox" checked=${wanted} onChange=${(event) => setWanted(event.target.checked)} /> Also the base model, beside it (needs memory for both)</label>`}
        <div class="actions"><button type="button" class="primary large" onClick=${open} disabled=${isOpening}>${isOpening ? 'Starting …' : 'Start the chat'}</button></div>`}`}
    ${loading.length > 0 && html`<${Busy} text=${`Loading the ${loading.map((own) => NAMES[own.side].toLowerCase()).join(' and the ')}`} />`}
    ${ready.length > 0 && !loading.length && html`<${Talk} run=${run} sides=${ready} />
      <div class="actions"><button type="button" onClick=${() => act('close', {})}>End the chat and free the memory</button></div>`}
    ${sides.map((own) => html`<${Command} label=${`${NAMES[own.side]} in a terminal`} command=${own.command} />`)}
  </section>`;
}

/** The verdict beside the chat: a model can sound right and be wrong. @param {{ run: any }} own */
function VerdictOf({ run }) {
  if (!run.verdict) return html`<p class="hint">not tested: <${Link} to=${{ screen: 'run', id: run.id, tab: 'verdict' }}>no verdict yet<//></p>`;
  return html`<p class="states"><${VerdictWord} level=${run.verdict} /> <${Link} to=${{ screen: 'run', id: run.id, tab: 'verdict' }}>why<//></p>`;
}

/** The questions and the answers of both sides, as they are written. @param {{ run: any, sides: any[] }} own */
function Talk({ run, sides }) {
  const [talks, setTalks] = useState(/** @type {Record<string, Message[]>} */ ({}));
  const [isBusy, setBusy] = useState(false);
  const controller = useRef(new AbortController());
  const field = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  useEffect(() => {
    field.current?.focus({ preventScroll: true });
    return () => controller.current.abort();
  }, []);

  /** Change the last message of a side. @param {string} side @param {(last: Message) => Message} change */
  const edit = (side, change) => setTalks((old) => ({ ...old, [side]: [...old[side].slice(0, -1), change(old[side][old[side].length - 1])] }));

  const answer = async (side, /** @type {Message[]} */ messages) => {
    const own = messages.map(({ role, content }) => ({ role, content }));
    try {
      for await (const { name, data } of streamed('chat/say', { id: run.id, side, messages: own, temperature: 0 }, controller.current.signal)) {
        if (name === 'delta') edit(side, (last) => ({ ...last, content: last.content + data.text }));
        else if (name === 'done') edit(side, (last) => ({ ...last, ...data }));
        else if (name === 'error') edit(side, (last) => ({ ...last, error: new ApiError(400, data.error) }));
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
    const asked = Object.fromEntries(
      sides.map(({ side }) => [side, [...(talks[side] ?? []).filter((own) => !own.error), { role: 'user', content: text }]]),
    );
    setTalks(Object.fromEntries(sides.map(({ side }) => [side, [...asked[side], { role: 'assistant', content: '' }]])));
    await Promise.all(sides.map(({ side }) => answer(side, asked[side])));
    setBusy(false);
    announce('Answered');
    field.current?.focus({ preventScroll: true });
  };
  const key = (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) ask(event);
  };
  const turns = Math.max(0, ...sides.map(({ side }) => talks[side]?.length ?? 0)) / 2;
  return html`<div class="talk">
      ${Array.from({ length: Math.ceil(turns) }, (_, turn) => html`<article class="exchange" key=${turn}>
        <div class="question"><${Said} text=${talks[sides[0].side]?.[2 * turn]?.content} label="Question" /></div>
        <div class=${`sides ${sides.length > 1 ? '' : 'alone'}`}>
          ${sides.map(({ side, name }) => html`<${Reply} key=${side} side=${side} name=${name} message=${talks[side]?.[2 * turn + 1]} isLast=${isBusy && turn === Math.ceil(turns) - 1} />`)}
        </div></article>`)}
    </div>
    <form class="ask" onSubmit=${ask}>
      <label for="ask">Your question</label>
      <textarea id="ask" ref=${field} rows="2" onKeyDown=${key} dir="auto"></textarea>
      <div class="actions"><button class="primary" disabled=${isBusy}>Ask</button>
        ${isBusy && html`<button type="button" onClick=${() => controller.current.abort()}>Stop</button>`}
        ${turns > 0 && !isBusy && html`<button type="button" onClick=${() => setTalks({})}>Start anew</button>`}</div>
    </form>`;
}

/** @param {{ side: string, name: string, message?: Message, isLast: boolean }} own */
function Reply({ side, name, message, isLast }) {
  const isEmpty = !message?.content;
  return html`<div class="answer" data-side=${side}><p class="label"><span>${NAMES[side]}</span> <${Bdi} text=${name} /></p>
    ${message?.error ? html`<${Problem} error=${message.error} />` : isEmpty && isLast ? html`<${Said} label="Answer"><${Busy} text="Thinking" /><//>` : html`<${Said} text=${message?.content ?? ''} label=${`Answer of the ${sentence(side)} model`} />`}
    ${message?.seconds !== undefined && html`<p class="hint">${message.tokens !== undefined && `${count(message.tokens, 'token')}, `}${duration(message.seconds)}</p>`}
    ${isEmpty && !isLast && !message?.error && html`<p class="hint">${visible('stopped')}</p>`}</div>`;
}
