// Verdict: what the report says, wrong answers first, and what to do now.
import { html, useEffect, useState } from './vendor/vendor.js';
import { ApiError, download } from './api.js';
import { count, date, number, visible, words } from './format.js';
import { Answer, Bdi, Busy, Command, Exchange, Facts, More, Numbers, Problem } from './parts.js';
import { Prose, Reasons, Search, Sign, useLoaded } from './parts.js';
import { go } from './router.js';
import { Actions } from './run.js';

const PAGE = 10;
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
  const path = run.has_report ? `report?${new URLSearchParams({ id: run.id })}` : null;
  const { data: report, error, again } = useLoaded(path);
  useEffect(again, [run.verdict, run.job?.status]);
  if (!run.has_report || error?.status === 404)
    return html`<${None} run=${run} session=${session} error=${error} />`;
  if (error) return html`<${Problem} error=${error} onRetry=${again} />`;
  if (!report) return html`<${Busy} text="Reading the report" />`;
  const { view, subject } = report;
  const tested = `${subject.kind === 'run' ? 'a run' : subject.kind}${subject.step === null ? '' : `; checkpoint of step ${count(subject.step)}`}`;
  const facts = [
    ['Tested', html`${tested} <span class="hint"><${Prose} text=${subject.because} /></span>`],
    ['Base model', subject.base && html`<${Bdi} text=${subject.base} />`],
    ['Tested on', html`<${Prose} text=${report.data} />`],
    ['When', `${date(report.made_at)}, ${report.made_by}`],
  ];
  const thresholds = Object.entries(report.thresholds).map(([key, own]) => ({ key, ...own }));
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
      <${Facts} pairs=${facts} />
      <details><summary>Thresholds of the verdict</summary>
        <${Reasons} chosen=${thresholds} />
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
  ].filter((own) => own && (possible.get(own.id)?.is_possible ?? true));
  return html`${report.next_steps.map((own) => html`<p class="next"><${Prose} text=${own.words} /></p><${Command} command=${own.command} label="Command" />`)}
    <div class="actions">${buttons.map((own, index) => html`<button type="button" class=${index === 0 && report.verdict === 'PASS' ? 'primary' : ''} onClick=${() => go({ screen: 'run', id: run.id, tab: own.tab })}>${own.label}</button>`)}
      ${!session.is_read_only && html`<button type="button" onClick=${() => go({ screen: 'new' })}>New model with other rows</button>`}</div>
    <${Actions} session=${session} run=${run} />`;
}

/** One of the most important metrics: before, after, and how much that is. @param {{ metric: any }} own */
function Card({ metric }) {
  const [base, tuned] = metric.shares ?? [null, null];
  const bar = (name, y, share) =>
    html`<rect class="rail" y=${y} width="240" height="5" rx="2.5" /><rect class=${name} y=${y} width=${240 * (share ?? 0)} height="5" rx="2.5" />`;
  return html`<div class="card"><p class="label">${metric.name}</p>
    <p class="figures">${metric.base && html`<span>${metric.base}</span> → `}<strong>${metric.tuned}</strong></p>
    ${metric.shares && html`<svg class="bars" viewBox="0 0 240 13" preserveAspectRatio="none" aria-hidden="true">${bar('base', 0, base)}${bar('tuned', 8, tuned)}</svg>`}
    <p class="hint">${metric.change && html`<strong>${metric.change}</strong>`}${metric.change && metric.hint && '; '}${metric.hint}</p></div>`;
}

/** @param {{ caption: string, metrics: any[] }} own */
const Metrics = ({ caption, metrics }) => {
  const name = (own) =>
    html`<bdi>${visible(own.name)}</bdi>${own.hint && html`<span class="hint">${own.hint}</span>`}`;
  const rows = metrics.map((own) => [name(own), own.base, own.tuned, own.change]);
  return html`<${Numbers} caption=${caption} head=${['Metric', 'Base', 'Tuned', 'Change']} rows=${rows} />`;
};

/** What the task adds: labels that are confused, or fields that are wrong. @param {{ report: any }} own */
function Task({ report }) {
  const bdi = (text) => html`<${Bdi} text=${text} />`;
  const most = report.confusions.slice(0, MAX_CONFUSIONS);
  const confused = most.map((own) => [bdi(own.expected), bdi(own.said), count(own.number)]);
  const field = ([name, numbers]) => [bdi(name), ...numbers.map((own) => count(own))];
  const fields = report.view.fields.map(field);
  if (!confused.length && !fields.length) return null;
  const named = ['right', 'wrong', 'missing', 'extra'];
  return html`<section>
    ${confused.length > 0 && html`<h2>Labels that it confuses</h2><${Numbers} caption=${report.task?.because ?? ''} head=${['Expected', 'Answered', 'Times']} rows=${confused} left=${2} />`}
    ${fields.length > 0 && html`<h2>Fields</h2><${Numbers} head=${['Field', ...named]} rows=${fields} />`}
  </section>`;
}

/** The answers, wrong ones first, with a filter and a search in the address.
 * @param {{ report: any, run: any, place: import('./router.js').Place, faults: Record<string, string> }} own */
function Answers({ report, run, place, faults }) {
  const counts = report.exchanges_counts;
  const kind = place.kind ?? 'all';
  const [limit, setLimit] = useState(PAGE);
  const asked = { id: run.id, kind, search: place.q ?? '', limit: String(limit) };
  const { data, error } = useLoaded(counts.all ? `answers?${new URLSearchParams(asked)}` : null);
  if (!counts.all) return html`<p class="none">No questions were asked.</p>`;
  const isShown = (name) => ['all', kind].includes(name) || counts[name] > 0;
  const shown = Object.keys(KINDS).filter(isShown);
  const choose = (name) => {
    setLimit(PAGE);
    go({ ...place, kind: name === 'all' ? '' : name }, { replace: true });
  };
  return html`<div class="filters">
      <fieldset class="choices"><legend class="label">Show</legend>
        ${shown.map((name) => html`<button type="button" aria-pressed=${name === kind} onClick=${() => choose(name)}>${KINDS[name]}, ${count(counts[name] ?? 0)}</button>`)}</fieldset>
      <${Search} place=${place} label="Search in questions and answers" />
    </div>
    <${Problem} error=${error} />
    ${data?.answers.length === 0 && html`<p class="none">No answer of this kind${place.q ? ' with this text' : ''}.</p>`}
    ${data?.answers.map((own) => answered(own, faults))}
    ${data && html`<${More} shown=${data.answers.length} total=${data.total} noun="answer" onMore=${() => setLimit((own) => own + 2 * PAGE)} />`}`;
}

/** One question with both answers. @param {any} own @param {Record<string, string>} faults */
function answered(own, faults) {
  const given = (name, answer) => {
    const end = answer.ended ? 'stopped by itself' : 'cut off at the limit';
    const hint = html`${answer.because && html`<${Prose} text=${answer.because} />, `}${count(answer.num_tokens, 'token')}, ${end}, F1 ${number(answer.f1, 2)}`;
    const named = answer.faults.map((fault) => faults[fault] ?? words(fault));
    const wrong = answer.is_refusal ? 'refused' : 'wrong';
    return html`<${Answer} name=${name} text=${answer.text} right=${answer.right} wrong=${wrong} faults=${named} hint=${hint} />`;
  };
  const head = html`Row ${count(own.row)} of <${Bdi} text=${own.source} />${own.is_near && ', nearly a training row'}${own.is_ambiguous && ', another row has the same question'}`;
  const contains = own.key === own.reference ? '' : own.key;
  return html`<${Exchange} question=${own.question} reference=${own.reference} contains=${contains} head=${head} key=${own.document}>
    ${own.base && given('Base model', own.base)} ${given('Tuned model', own.tuned)}<//>`;
}

/** What it could do before and cannot now. @param {{ report: any }} own */
function Forgotten({ report }) {
  if (!report.forgotten.length && !report.ordinary.length) return null;
  const ordinary = ({ question, base, tuned }) =>
    html`<${Exchange} question=${question}><${Answer} name="Base model" text=${base} /><${Answer} name="Tuned model" text=${tuned} /><//>`;
  return html`<section><h2>What was forgotten</h2>
    ${report.forgotten.length > 0 && html`<ul class="notes">${report.forgotten.map((own) => html`<li class=${own.is_damaged ? 'bad' : ''}><strong>${own.name}</strong>: <${Prose} text=${own.result} />${own.is_damaged && html` <span class="badge WEAK"><${Sign} name="WEAK" />beyond the limit</span>`}</li>`)}</ul>`}
    ${report.ordinary.length > 0 && html`<details><summary>Everyday questions, before and after</summary>${report.ordinary.slice(0, PAGE).map(ordinary)}</details>`}
  </section>`;
}
