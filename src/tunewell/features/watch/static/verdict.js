// Verdict: what the report says, wrong answers first, and what to do now.
import { html, useEffect, useState } from './vendor/vendor.js';
import { ApiError, download } from './api.js';
import { count, date, loss, number, percent, setting, visible, words } from './format.js';
import { Bdi, Busy, Command, Facts, More, Numbers, Problem, Prose, Reasons } from './parts.js';
import { Said, Sign, useLoaded } from './parts.js';
import { go } from './router.js';
import { Actions } from './run.js';

const PAGE = 10;
const TYPING_MS = 250;
const KINDS = {
  all: 'all',
  wrong: 'wrong',
  lost: 'right before, now wrong',
  faulty: 'faulty',
  unjudged: 'not judged',
  right: 'right',
  changed: 'changed',
};
const MAX_CONFUSIONS = 12;

/** @param {{ session: any, run: any, place: import('./router.js').Place }} own */
export function Verdict({ session, run, place }) {
  const { data: report, error, again } = useLoaded(run.has_report ? `report?${new URLSearchParams({ id: run.id })}` : null);
  useEffect(again, [run.verdict, run.job?.status]);
  if (!run.has_report || error?.code === 'not_found') return html`<${None} run=${run} session=${session} error=${error} />`;
  if (error) return html`<${Problem} error=${error} onRetry=${again} />`;
  if (!report) return html`<${Busy} text="Reading the report" />`;
  const view = report.view;
  return html`
    <p class="eyebrow">${view.title}</p>
    ${report.is_stale && html`<div class="notice"><p><strong>This verdict is older than the model.</strong> Test it again.</p></div>`}
    <div class=${`verdict ${report.verdict}`}>
      <${Sign} name=${report.verdict} />
      <div><p class="level"><strong>${report.verdict}</strong> <span>${report.headline}</span></p>
        <p class="summary"><${Prose} text=${report.summary} /></p></div>
    </div>
    ${report.reasons.length > 0 && html`<section><h2>Why</h2>${report.reasons.map((own) => html`<${Reason} reason=${own} key=${own.code} />`)}</section>`}
    <section><h2>What now?</h2><${Next} report=${report} run=${run} session=${session} /></section>
    <section><h2>Before and after</h2>
      <div class="cards">${view.key_metrics.map((own) => html`<${Card} metric=${own} key=${own.name} />`)}</div>
      <${Metrics} caption="All metrics" metrics=${view.metrics} />
      ${view.source_metrics.length > 0 && html`<${Metrics} caption="Held-out loss by source" metrics=${view.source_metrics} />`}
    </section>
    <${Task} report=${report} />
    <section><h2>Answers</h2>
      ${view.judge_sentences.map((text) => html`<p class="fine"><${Prose} text=${text} /></p>`)}
      <${Answers} report=${report} run=${run} place=${place} faults=${view.fault_words} />
    </section>
    <${Forgotten} report=${report} />
    ${report.notes.length > 0 && html`<section><h2>Notes</h2><ul class="notes">${report.notes.map((text) => html`<li><${Prose} text=${text} /></li>`)}</ul></section>`}
    <section><h2>How it was tested</h2>
      <${Facts} pairs=${[
        ['Tested', html`${report.subject.kind === 'run' ? 'a run' : report.subject.kind}${report.subject.step !== null ? `; checkpoint of step ${count(report.subject.step)}` : ''} <span class="hint"><${Prose} text=${report.subject.because} /></span>`],
        ['Base model', report.subject.base && html`<${Bdi} text=${report.subject.base} />`],
        ['Tested on', html`<${Prose} text=${report.data} />`],
        ['When', `${date(report.made_at)}, ${report.made_by}`],
      ]} />
      <details><summary>Thresholds of the verdict</summary>
        <${Reasons} head=${['Threshold', 'Value', 'Reason']} rows=${Object.entries(report.thresholds).map(([name, own]) => [words(name), setting((own).value), html`<${Prose} text=${(own).because} />`])} />
      </details>
      ${report.has_page && html`<p><button type="button" onClick=${() => download(`${run.id === '.' ? '' : `${run.id}/`}report.html`)}>Save the report as one file</button></p>`}
    </section>
    <${Command} command=${report.command} />`;
}

/** No verdict yet: why, and the way to one. @param {{ session: any, run: any, error: ApiError | null }} own */
function None({ session, run, error }) {
  const isRunning = run.status === 'running';
  return html`<section><h2>${isRunning ? 'The verdict comes after the training' : 'There is no verdict yet'}</h2>
    <p class="lead">${isRunning ? 'Rows that the model never sees are kept aside. At the end it answers them, next to the model as it was before.' : error ? html`<${Prose} text=${error.fix || error.message} />` : 'Let it answer rows that it has not seen, next to the model as it was before.'}</p>
    ${!isRunning && html`<${Actions} session=${session} run=${run} />`}</section>`;
}

/** @param {{ reason: any }} own */
function Reason({ reason }) {
  return html`<div class=${`reason ${reason.level}`}>
    <p><span class=${`badge ${reason.level}`}><${Sign} name=${reason.level} />${words(reason.code)}</span></p>
    <p><${Prose} text=${reason.what} /></p>
    ${reason.example && html`<p class="hint">For example: <bdi>${visible(reason.example)}</bdi></p>`}
  </div>`;
}

/** The next steps, each with its command and, where the page can do it, a button. @param {{ report: any, run: any, session: any }} own */
function Next({ report, run, session }) {
  const possible = new Map((run.actions ?? []).map((own) => [own.id, own]));
  const buttons = [
    session.features.chat && { tab: 'chat', label: 'Talk to it', id: 'chat' },
    { tab: 'export', label: 'Take it to Ollama or elsewhere', id: 'export' },
  ].filter((own) => own && ((possible.get(own.id))?.is_possible ?? true));
  return html`${report.next_steps.map((own) => html`<div class="next">
      <p><${Prose} text=${own.words} /></p>
      <${Command} command=${own.command} label="Command" />
    </div>`)}
    <div class="actions">${buttons.map((own, index) => html`<button type="button" class=${index === 0 && report.verdict === 'PASS' ? 'primary' : ''} onClick=${() => go({ screen: 'run', id: run.id, tab: own.tab })}>${own.label}</button>`)}
      ${!session.is_read_only && html`<button type="button" onClick=${() => go({ screen: 'new' })}>New model with other rows</button>`}</div>
    <${Actions} session=${session} run=${run} />`;
}

/** One of the most important metrics: before, after, and how much that is. @param {{ metric: any }} own */
function Card({ metric }) {
  const [base, tuned] = metric.shares ?? [null, null];
  const wide = (share) => 240 * (share ?? 0);
  return html`<div class="card"><p class="label">${metric.name}</p>
    <p class="figures">${metric.base && html`<span>${metric.base}</span> → `}<strong>${metric.tuned}</strong></p>
    ${metric.shares && html`<svg class="bars" viewBox="0 0 240 13" preserveAspectRatio="none" aria-hidden="true">
      <rect class="rail" width="240" height="5" rx="2.5" /><rect class="base" width=${wide(base)} height="5" rx="2.5" />
      <rect class="rail" y="8" width="240" height="5" rx="2.5" /><rect class="tuned" y="8" width=${wide(tuned)} height="5" rx="2.5" /></svg>`}
    <p class="hint">${metric.change && html`<strong>${metric.change}</strong>`}${metric.change && metric.hint && '; '}${metric.hint}</p></div>`;
}

/** @param {{ caption: string, metrics: any[] }} own */
const Metrics = ({ caption, metrics }) => {
  const rows = metrics.map((own) => [html`<bdi>${visible(own.name)}</bdi>${own.hint && html`<span class="hint">${own.hint}</span>`}`, own.base, own.tuned, own.change]);
  return html`<${Numbers} caption=${caption} head=${['Metric', 'Base', 'Tuned', 'Change']} rows=${rows} />`;
};

/** What the task adds: labels that are confused, or fields that are wrong. @param {{ report: any }} own */
function Task({ report }) {
  const confused = report.confusions.slice(0, MAX_CONFUSIONS).map((own) => [html`<${Bdi} text=${own.expected} />`, html`<${Bdi} text=${own.said} />`, count(own.number)]);
  const fields = report.view.fields ?? [];
  if (!confused.length && !fields.length) return null;
  const named = ['right', 'wrong', 'missing', 'extra'];
  return html`<section>
    ${confused.length > 0 && html`<h2>Labels that it confuses</h2><${Numbers} caption=${report.task?.because ?? ''} head=${['Expected', 'Answered', 'Times']} rows=${confused} left=${2} />`}
    ${fields.length > 0 && html`<h2>Fields</h2><${Numbers} head=${['Field', ...named]} rows=${fieldRows(report.fields, named)} />`}
  </section>`;
}

/** @param {Record<string, Record<string, number>>} fields @param {string[]} named */
const fieldRows = (fields, named) =>
  Object.entries(fields).map(([name, numbers]) => [html`<${Bdi} text=${name} />`, ...named.map((kind) => count(numbers[kind] ?? 0))]);

/** The answers, wrong ones first, with a filter and a search in the address.
 * @param {{ report: any, run: any, place: import('./router.js').Place, faults: Record<string, string> }} own */
function Answers({ report, run, place, faults }) {
  const counts = report.exchanges_counts;
  const kind = place.kind ?? 'all';
  const [typed, setTyped] = useState(place.q ?? '');
  const [limit, setLimit] = useState(PAGE);
  const query = new URLSearchParams({ id: run.id, kind, search: place.q ?? '', limit: String(limit) });
  const { data, error } = useLoaded(counts.all ? `answers?${query}` : null);
  useEffect(() => {
    const timer = setTimeout(() => typed !== (place.q ?? '') && go({ ...place, q: typed }, { replace: true }), TYPING_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  if (!counts.all) return html`<p class="none">No questions were asked.</p>`;
  const shown = Object.entries(KINDS).filter(([name]) => name === 'all' || name === kind || counts[name] > 0);
  return html`<div class="filters">
      <fieldset class="choices"><legend class="label">Show</legend>
        ${shown.map(([name, text]) => html`<button type="button" aria-pressed=${name === kind} onClick=${() => { setLimit(PAGE); go({ ...place, kind: name === 'all' ? '' : name }, { replace: true }); }}>${text}, ${count(counts[name] ?? 0)}</button>`)}</fieldset>
      <div><label for="search">Search in questions and answers</label>
        <input id="search" type="search" value=${typed} onInput=${(event) => setTyped(event.target.value)} /></div>
    </div>
    <${Problem} error=${error} />
    ${data?.answers.length === 0 && html`<p class="none">No answer of this kind${place.q ? ' with this text' : ''}.</p>`}
    ${data?.answers.map((own) => html`<${Exchange} own=${own} faults=${faults} key=${own.document} />`)}
    ${data && html`<${More} shown=${data.answers.length} total=${data.total} noun="answer" onMore=${() => setLimit((own) => own + 2 * PAGE)} />`}`;
}

/** @param {{ own: any, faults: Record<string, string> }} own */
function Exchange({ own, faults }) {
  return html`<article class="exchange">
    <h3 class="where">Row ${count(own.row)} of <${Bdi} text=${own.source} />${own.is_near && ', nearly a training row'}${own.is_ambiguous && ', another row has the same question'}</h3>
    <div class="question"><${Said} text=${own.question} label="Question" /></div>
    <div class="reference"><span class="label">Expected</span><${Said} text=${own.reference} label="Expected answer" /></div>
    ${own.key && own.key !== own.reference && html`<div class="reference"><span class="label">Must contain</span><${Said} text=${own.key} label="Key" /></div>`}
    <div class=${`sides ${own.base ? '' : 'alone'}`}>
      ${own.base && html`<${Given} name="Base model" answer=${own.base} faults=${faults} />`}
      <${Given} name="Tuned model" answer=${own.tuned} faults=${faults} />
    </div></article>`;
}

/** @param {{ name: string, answer: any, faults: Record<string, string> }} own */
function Given({ name, answer, faults }) {
  const mark = answer.right === null ? '' : answer.right ? 'right' : 'wrong';
  return html`<div class="answer"><p class="label"><span>${name}</span>
      ${mark && html`<span class=${`mark ${mark}`}><${Sign} name=${mark} />${mark === 'wrong' && answer.is_refusal ? 'refused' : mark}</span>`}
      ${answer.faults.map((own) => html`<span>${faults[own] ?? words(own)}</span>`)}</p>
    <${Said} text=${answer.text} label=${`Answer of the ${name.toLowerCase()}`} />
    <p class="hint">${answer.because && html`<${Prose} text=${answer.because} />, `}${count(answer.num_tokens, 'token')}, ${answer.ended ? 'stopped by itself' : 'cut off at the limit'}, F1 ${number(answer.f1, 2)}</p></div>`;
}

/** What it could do before and cannot now. @param {{ report: any }} own */
function Forgotten({ report }) {
  if (!report.forgotten.length && !report.ordinary.length) return null;
  return html`<section><h2>What was forgotten</h2>
    ${report.forgotten.length > 0 && html`<ul class="notes">${report.forgotten.map((own) => html`<li class=${own.is_damaged ? 'bad' : ''}><strong>${own.name}</strong>: <${Prose} text=${own.result} />${own.is_damaged && html` <span class="badge WEAK"><${Sign} name="WEAK" />beyond the limit</span>`}</li>`)}</ul>`}
    ${report.ordinary.length > 0 && html`<details><summary>Everyday questions, before and after</summary>
      ${report.ordinary.slice(0, PAGE).map((own) => html`<article class="exchange"><div class="question"><${Said} text=${own.question} label="Question" /></div>
        <div class="sides"><div class="answer"><p class="label">Base model</p><${Said} text=${own.base} label="Answer of the base model" /></div>
        <div class="answer"><p class="label">Tuned model</p><${Said} text=${own.tuned} label="Answer of the tuned model" /></div></div></article>`)}</details>`}
  </section>`;
}
