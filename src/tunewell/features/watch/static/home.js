// Home: the runs of the folder, and the way to a new one. Sort, search and filter are in the address.
import { html, useEffect, useState } from './vendor/vendor.js';
import { follow } from './api.js';
import { ago, count, date, loss } from './format.js';
import { Bar, Bdi, Busy, Command, More, Problem, Search, VerdictWord, useLoaded } from './parts.js';
import { Link, go } from './router.js';

const PAGE = 100;
const BAD = ['killed', 'failed', 'stopped', 'unreadable'];
const SORTS = {
  when: 'newest first',
  held_out: 'lowest held-out loss first',
  loss: 'lowest loss first',
  verdict: 'by verdict',
  status: 'by status',
  steps: 'most steps first',
  run: 'by name',
};
/** @type {Record<string, string>} */
export const STATUS = {
  starting: 'starting',
  running: 'running',
  finished: 'finished',
  interrupted: 'stopped, can be resumed',
  stopped: 'stopped by health',
  failed: 'failed',
  killed: 'crashed or killed',
  unreadable: 'unreadable',
};

/** The status of a run as a word with a mark, so that it needs no colour. @param {{ run: any }} own */
export function StatusWord({ run }) {
  const status = String(run.status);
  const text = STATUS[status] ?? status;
  return html`<span class=${`status ${status} ${BAD.includes(status) ? 'bad' : ''}`}><span class="mark" aria-hidden="true"></span>${text}</span>`;
}

/** How far a run is. @param {{ run: any }} own */
export function Steps({ run }) {
  if (run.steps === null || run.steps === undefined) return null;
  const planned = run.planned_steps;
  const text = `step ${count(run.steps)}${planned ? ` of ${count(planned)}` : ''}`;
  if (run.status !== 'running' || !planned) return html`<span class="hint">${text}</span>`;
  return html`<${Bar} share=${run.steps / planned} label="Progress" text=${text} />`;
}

/** @param {{ session: any, place: import('./router.js').Place }} own */
export function Home({ session, place }) {
  const [limit, setLimit] = useState(PAGE);
  const { q: search = '', sort = 'when', status = '' } = place;
  const query = new URLSearchParams({ sort, search, status, limit: String(limit) });
  const { data, error, again } = useLoaded(`runs?${query}`);
  const [live, setLive] = useState(/** @type {Map<string, any>} */ (new Map()));

  useEffect(() => {
    document.title = `${session.name} · tunewell`;
    return follow('stream?runs=1', ({ name, data: own }) => {
      if (name !== 'runs') return;
      setLive((old) => new Map([...old, ...own.rows.map((row) => [row.id, row])]));
      if (own.gone.length || own.rows.some((row) => !known.has(row.id))) again();
    });
  }, []);
  for (const row of data?.runs ?? []) known.add(row.id);

  const runs = (data?.runs ?? []).map((row) => live.get(row.id) ?? row);
  const isEmpty = data && data.total === 0;
  return html`
    <div class="title-row">
      <h1 tabindex="-1">${isEmpty ? 'Train a model on your own conversations' : 'Runs'}</h1>
      ${!session.is_read_only && !isEmpty && html`<${Link} to=${{ screen: 'new' }} class="button primary large">New model<//>`}
    </div>
    <${Problem} error=${error} onRetry=${again} />
    ${!data && !error && html`<${Busy} text="Looking for runs" />`}
    ${isEmpty && html`<${Welcome} isReadOnly=${session.is_read_only} />`}
    ${data && !isEmpty && html`<${Filters} place=${place} data=${data} />`}
    ${data?.total > 0 && !runs.length && html`<p class="none">No run matches. <${Link} to=${{ screen: 'home' }}>Show all<//></p>`}
    <ul class="runs">${runs.map((run) => html`<${Row} key=${run.id} run=${run} />`)}</ul>
    ${data && html`<${More} shown=${runs.length} total=${data.found} noun="run" onMore=${() => setLimit((own) => own + PAGE)} />`}
    <${Command} command=${data?.command} />
  `;
}

const known = new Set();

/** Search, filter and sort. @param {{ place: import('./router.js').Place, data: any }} own */
function Filters({ place, data }) {
  const named = ([name, own]) => [name, `${STATUS[name] ?? name}, ${count(own)}`];
  const counts = Object.entries(data.counts).map(named);
  const select = (name, label, options) => html`<div><label for=${name}>${label}</label>
    <select id=${name} value=${place[name] ?? options[0][0]} onChange=${({ target }) => go({ ...place, [name]: target.value }, { replace: true })}>
      ${options.map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></div>`;
  return html`<div class="filters"><${Search} place=${place} label="Search" key=${place.q ? 'typed' : ''} />
    ${select('status', 'Status', [['', `all, ${count(data.total)}`], ...counts])}
    ${select('sort', 'Sort', Object.entries(SORTS))}</div>`;
}

/** @param {{ run: any }} own */
function Row({ run }) {
  const losses = [
    run.held_out !== null && html`<span class="hint">held-out <b>${loss(run.held_out)}</b></span>`,
    run.loss !== null && html`<span class="hint">loss <b>${loss(run.loss)}</b></span>`,
  ];
  return html`<li class="run" data-run=${run.id}>
    <div class="run-name">
      <${Link} to=${{ screen: 'run', id: run.id }}><${Bdi} text=${run.id} /><//>
      <p class="hint"><${Bdi} text=${[run.data, run.model, run.method].filter(Boolean).join(' · ')} /></p>
      ${run.access_words && html`<p class="hint">${run.access_words}</p>`}
    </div>
    <div class="run-state"><${StatusWord} run=${run} /><${Steps} run=${run} />
      ${run.note && BAD.includes(run.status) && html`<p class="hint">${run.note}</p>`}</div>
    <div class="run-losses">${losses}</div>
    <div class="run-verdict"><${VerdictWord} level=${run.verdict} /><time class="hint" datetime=${run.when} title=${date(run.when)}>${ago(run.when)}</time></div>
  </li>`;
}

/** What there is to do in a folder without runs. @param {{ isReadOnly: boolean }} own */
function Welcome({ isReadOnly }) {
  const steps = [
    ['Give it your rows', 'A table of questions and answers, an exported chat, or documents.'],
    ['Answer a few questions', 'The first rows are shown as they will be read.'],
    ['Watch it learn', 'With a model and settings that fit this computer, and their reasons.'],
    ['See whether it worked', 'Rows that it never saw are the test, with the answers to look at.'],
  ];
  return html`<ol class="cards welcome">
      ${steps.map(([name, text]) => html`<li class="card"><strong>${name}</strong><span>${text}</span></li>`)}
    </ol>
    ${isReadOnly && html`<p class="none">There is no run in this folder, and this page was started with <code>--read-only</code>.</p>`}
    ${!isReadOnly && html`<p><${Link} to=${{ screen: 'new' }} class="button primary large">Choose your rows<//></p>`}`;
}
