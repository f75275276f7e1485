// Run: the curve as it is written, health, samples, the log; and the screens of what comes after training.
import { html, useEffect, useRef, useState } from './vendor/vendor.js';
import { ApiError, follow, get, send } from './api.js';
import { Chart, METRICS } from './chart.js';
import { Chat } from './chat.js';
import { Export } from './export.js';
import { ago, count, date, duration, loss, number, setting, size, visible } from './format.js';
import { words } from './format.js';
import { STATUS, StatusWord } from './home.js';
import { Job } from './new.js';
import { Answer, Bar, Bdi, Busy, Command, Exchange, Facts, More, Problem, Prose } from './parts.js';
import { Reasons, Sign, VerdictWord, announce, sentence } from './parts.js';
import { Link } from './router.js';
import { Verdict } from './verdict.js';

const TABS = { '': 'Training', verdict: 'Verdict', chat: 'Chat', export: 'Export' };
const SCREENS = { verdict: Verdict, chat: Chat, export: Export };
const MAX_LOG = 65_536;
const NUM_SAMPLES = 4;
const TURN_END = /(<\|[\w-]+\|>|<\/s>|<end_of_turn>)\s*$/;

/** Load a run and follow it. What is shown is what the records say: a reset of a log drops what was undone.
 * @param {string} id */
function useRun(id) {
  const [run, setRun] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const [line, setLine] = useState('');
  const [round, setRound] = useState(0);
  const records = useRef(/** @type {any} */ ({ curve: null, samples: [], log: {} }));
  const [shown, setShown] = useState(records.current);

  useEffect(() => {
    const controller = new AbortController();
    const query = new URLSearchParams({ id });
    let end = () => {};
    let frame = 0;
    // New objects, because a part whose values are the same is not drawn again.
    const show = () => {
      frame = 0;
      const { curve, samples: known, log } = records.current;
      setShown({ curve: { ...curve }, samples: [...known], log: { ...log } });
    };
    const draw = () => {
      frame ||= requestAnimationFrame(show);
    };
    const onEvent = (/** @type {{ name: string, data: any }} */ { name, data }) => {
      const own = records.current;
      if (name === 'run') setRun((old) => ({ ...old, ...data }));
      else if (name === 'gone') setError(new ApiError(404, data.error));
      else if (name === 'steps') for (const row of data.rows) append(own.curve, row);
      else if (name === 'held_out') own.curve.held_out = [...own.curve.held_out, ...data.rows];
      else if (name === 'healing') own.curve.healing = [...own.curve.healing, ...data.rows];
      else if (name === 'samples') for (const row of data.rows) addSample(own.samples, row);
      else if (name === 'log') own.log.text = (own.log.text + data.text).slice(-MAX_LOG);
      else if (name === 'reset') {
        if (own.curve) undo(own.curve, data.last_step ?? -1);
        end();
        setTimeout(() => setRound((old) => old + 1), 0);
      }
      draw();
    };
    const load = async () => {
      try {
        // First the curve: the stream goes on where it ends, so what is read later may come twice, but is never lost.
        const curve = await get(`curve?${query}`, controller.signal);
        const [first, samples, log] = await Promise.all([
          get(`run?${query}`, controller.signal),
          get(`samples?${query}`, controller.signal),
          get(`log?${query}`, controller.signal),
        ]);
        records.current = { curve, samples: [], log };
        for (const row of samples.rows) addSample(records.current.samples, row);
        setRun(first);
        setError(null);
        draw();
        const stream = `stream?${new URLSearchParams({ run: id, after: curve.cursor, log: log.cursor ?? '' })}`;
        end = follow(stream, onEvent, {
          onState: (state, failure) => (failure ? setError(failure) : setLine(state)),
        });
      } catch (failure) {
        if (controller.signal.aborted) return;
        setError(failure);
        const { status } = /** @type {ApiError} */ (failure);
        if (!status || status >= 500) setTimeout(() => setRound((own) => own + 1), 2000);
      }
    };
    load();
    return () => {
      controller.abort();
      cancelAnimationFrame(frame);
      end();
    };
  }, [id, round]);
  return { run, error, line, ...shown, again: () => setRound((own) => own + 1) };
}

/** @param {any} curve @param {any} row */
function append(curve, row) {
  for (const name of Object.keys(curve.columns)) curve.columns[name].push(row[name] ?? null);
}

/** Drop the steps that a rewind has undone. @param {any} curve @param {number} last */
function undo(curve, last) {
  const kept = curve.columns.step.filter((step) => step <= last).length;
  for (const name of Object.keys(curve.columns)) curve.columns[name].length = kept;
  curve.held_out = curve.held_out.filter((own) => own.step <= last);
}

/** @param {any[]} questions @param {any} row */
function addSample(questions, row) {
  let own = questions.find((each) => each.document === row.document);
  if (!own) questions.push((own = { ...row, answers: [] }));
  if (own.answers.some((known) => known.step === row.step)) return;
  own.answers.push({ ...row, is_untrained: row.step === 0 });
}

/** @param {{ session: any, place: import('./router.js').Place }} own */
export function Run({ session, place }) {
  const { id = '', tab = '' } = place;
  const { run, error, line, curve, samples, log, again } = useRun(id);
  const isStarting = run?.status === 'starting';
  const was = useRef('');
  useEffect(() => {
    if (!run) return;
    document.title = `${run.verdict ? `${run.verdict} · ` : run.status === 'running' ? `${run.steps ?? 0}/${run.planned_steps ?? '?'} · ` : ''}${id} · tunewell`;
    if (was.current && was.current !== run.status) announce(`The run: ${STATUS[run.status]}`);
    was.current = run.status;
  }, [run?.status, run?.verdict, run?.steps]);
  useEffect(() => void (run && again()), [isStarting]);
  if (!run || !curve) {
    return html`<h1 tabindex="-1"><${Bdi} text=${id} /></h1>
      ${error ? html`<${Problem} error=${error} onRetry=${again} /><p><${Link} to=${{ screen: 'home' }}>All runs<//></p>` : html`<${Busy} text="Reading the run" />`}`;
  }
  const to = (own) => ({ screen: 'run', id, ...(own && { tab: own }) });
  const tabs = Object.entries(TABS).filter(([name]) => name !== 'chat' || session.features.chat);
  const screen = isStarting ? Starting : (SCREENS[tab] ?? Training);
  return html`
    <p class="eyebrow"><${Link} to=${{ screen: 'home' }}>Runs<//></p>
    <div class="title-row">
      <h1 tabindex="-1"><${Bdi} text=${id === '.' ? session.name : id} /></h1>
      <p class="states"><${StatusWord} run=${run} />${run.verdict && html`<${VerdictWord} level=${run.verdict} />`}</p>
    </div>
    ${!isStarting && html`<p class="hint"><${Bdi} text=${[run.data, run.model, run.method].filter(Boolean).join(' · ')} />, <time datetime=${run.when} title=${date(run.when)}>${ago(run.when)}</time></p>`}
    ${run.access_words && !isStarting && html`<div class="notice"><p><${Prose} text=${sentence(run.access_words)} /></p></div>`}
    <nav class="tabs" aria-label="Screens of this run"><ul>
      ${tabs.map(([name, text]) => html`<li><${Link} to=${to(name)} current=${tab === name}>${text}<//></li>`)}
    </ul></nav>
    <${Problem} error=${error} onRetry=${again} />
    ${line === 'cut' && html`<p class="hint" role="status">The connection was cut; it is opened again, and goes on where it was.</p>`}
    <${screen} session=${session} run=${run} place=${place} curve=${curve} samples=${samples} log=${log} />
  `;
}

/** @param {{ session: any, run: any, curve: any, samples: any[], log: any }} own */
function Training({ session, run, curve, samples, log }) {
  const [metric, setMetric] = useState(/** @type {import('./chart.js').Metric} */ ('loss'));
  const isRunning = run.status === 'running';
  const last = (name) => curve.columns[name]?.[curve.columns[name].length - 1] ?? null;
  const best = curve.held_out.findLast((own) => own.is_best);
  const share = run.planned_steps ? (run.steps ?? 0) / run.planned_steps : null;
  const said = (value, say) => (value === null || value === undefined ? null : say(value));
  const planned = run.planned_steps ? ` of ${count(run.planned_steps)}` : '';
  const left = said(run.seconds_left, (own) => `about ${duration(own)} left`);
  const steps = (own) => html`<span data-field="steps">${count(own)}</span>${planned}`;
  const far = said(run.steps, (own) => `step ${count(own)}${planned}`);
  const facts = /** @type {[string, unknown][]} */ ([
    ['Step', said(last('step') ?? run.steps, steps)],
    ['Loss', said(last('loss') ?? run.loss, loss)],
    ['Held-out loss, best', said(best?.loss ?? run.held_out, loss)],
    ['Learning rate', said(last('learning_rate'), number)],
    ['Speed', said(run.tokens_per_second, (own) => `${number(own)} tokens/s`)],
    ['Memory', said(last('memory_bytes'), size)],
    ['Times over the rows', said(last('epoch'), (own) => number(own, 3))],
    ['Took', said(run.elapsed, duration)],
  ]);
  return html`
    ${isRunning && html`<${Bar} share=${share} label="Progress of the training" text=${[run.stage?.startsWith('step') ? '' : sentence(run.stage ?? ''), far, left].filter(Boolean).join(', ')} />`}
    ${run.state && html`<p class="lead"><${Prose} text=${sentence(run.state)} /></p>`}
    ${run.job?.status === 'failed' && run.job.error && html`<${Problem} error=${new ApiError(400, run.job.error)} />`}
    ${(run.problems ?? []).map((text) => html`<div class="notice"><p><${Prose} text=${sentence(text)} /></p></div>`)}
    ${run.verdict && html`<${Link} to=${{ screen: 'run', id: run.id, tab: 'verdict' }} class="button large see"><${VerdictWord} level=${run.verdict} /> See the verdict and the answers<//>`}
    <${Actions} session=${session} run=${run} />
    <${Facts} pairs=${facts} />
    <section><div class="title-row"><h2>${METRICS[metric].name}</h2>
      <div class="choices" role="group" aria-label="Show">
        ${Object.entries(METRICS).map(([name, own]) => html`<button type="button" aria-pressed=${name === metric} onClick=${() => setMetric(/** @type {import('./chart.js').Metric} */ (name))}>${own.name}</button>`)}
      </div></div>
      ${curve.num_damaged > 0 && html`<div class="notice"><p>${count(curve.num_damaged, 'line')} of the log cannot be read and ${curve.num_damaged === 1 ? 'is' : 'are'} left out.</p></div>`}
      <${Chart} curve=${curve} metric=${metric} key=${metric} />
    </section>
    <${Health} healing=${curve.healing} lines=${run.healing_lines ?? []} advice=${run.advice ?? []} />
    <section><h2>Samples</h2><${Samples} questions=${samples} isRunning=${isRunning} /></section>
    ${run.crash && html`<section><h2>Why it crashed</h2><pre class="code" tabindex="0" dir="auto">${visible(run.crash)}</pre></section>`}
    <section><h2>Log</h2><${Log} log=${log} /></section>
    <section><h2>Settings</h2>
      ${!run.plan?.length && html`<p class="none">No plan was found: the settings are not known.</p>`}
      ${run.plan?.length > 0 && html`<details><summary>${count(run.plan.length, 'setting')}, each with its reason</summary><${Reasons} chosen=${run.plan} /></details>`}
      ${run.config && html`<details><summary>The file of the settings</summary><pre class="code" tabindex="0" dir="auto">${visible(run.config)}</pre></details>`}
    </section>
    <${Command} command=${run.command} />`;
}

/** A run that has no record yet: what its command does. @param {{ run: any, log: any }} own */
const Starting = ({ run, log }) =>
  html`<${Busy} text=${visible(run.job?.words || 'Starting: this takes some seconds')} />
    <${Log} log=${log} /><${Command} command=${run.job?.command ?? run.command} />`;

/** What can be done now, each with its command. @param {{ session: any, run: any }} own */
export function Actions({ session, run }) {
  const [state, setState] = useState(/** @type {any} */ ({}));
  const { id, status } = run;
  useEffect(() => setState((old) => (old.busy ? old : {})), [status]);
  const act = async (action) => {
    setState({ busy: action.id });
    try {
      const answer = await send('act', { id, action: action.id });
      setState({ message: answer.message, job: answer.job });
      announce(answer.message ?? '');
    } catch (error) {
      setState({ error });
    }
  };
  const own = (run.actions ?? []).filter((action) => !['chat', 'export'].includes(action.id));
  const possible = session.is_read_only ? [] : own.filter((action) => action.is_possible);
  const isRefused = (action) => !action.is_possible && action.why_not && action.id === 'resume';
  const refused = ['finished', 'running'].includes(status) ? [] : own.filter(isRefused);
  const button = (action, index) =>
    html`<button type="button" class=${index === 0 && status !== 'finished' ? 'primary' : ''} disabled=${Boolean(state.busy)} onClick=${() => act(action)}>
      ${state.busy === action.id ? 'A moment …' : action.label}</button>`;
  return html`<${Problem} error=${state.error} />
    ${possible.length > 0 && html`<div class="actions">${possible.map(button)}</div>`}
    ${refused.map((action) => html`<p class="hint">${action.label} is not possible: <${Prose} text=${action.why_not} /></p>`)}
    ${state.message && html`<p class="lead" role="status"><${Prose} text=${sentence(state.message)} /></p>`}
    ${state.job && html`<${Job} id=${state.job.id} key=${state.job.id} />`}
    ${possible.length > 0 && html`<details class="more"><summary>The same in a terminal</summary>${possible.map(({ label, command }) => html`<${Command} label=${label} command=${command} />`)}</details>`}`;
}

/** What health did, in words. @param {{ healing: any[], lines: string[], advice: string[] }} own */
function Health({ healing, lines, advice }) {
  if (!healing.length && !lines.length && !advice.length) return null;
  const one = (own) => html`<li class=${own.severity} data-step=${own.step}>
    <strong>Step ${count(own.step)}: ${own.severity}</strong> <${Prose} text=${own.words || words(own.name)} />
    ${typeof own.rewound_to === 'number' && html`<span class="hint"> Went back to step ${count(own.rewound_to)}.</span>`}
    ${own.seconds_lost > 0 && html`<span class="hint"> Took ${duration(own.seconds_lost)}.</span>`}</li>`;
  return html`<section><h2>Health</h2>
    <ul class="health">${healing.map(one)}</ul>
    ${lines.length > 0 && healing.length === 0 && html`<ul class="notes">${lines.map((text) => html`<li><${Prose} text=${text} /></li>`)}</ul>`}
    ${advice.map((text) => html`<p class="fine">Next time: <${Prose} text=${text} /></p>`)}
  </section>`;
}

/** An answer of a sample, with the step it is from. @param {any} own */
function sampled({ step, answer, right, fault, ended, is_untrained: isUntrained }) {
  const untrained = html`<strong>untrained</strong>, before the first step`;
  const name = isUntrained ? untrained : `after step ${count(step)}`;
  const hint = ended === false && 'cut off at the limit';
  return html`<${Answer} name=${name} text=${visible(answer)} right=${right} faults=${fault ? [words(fault)] : []} hint=${hint} />`;
}

/** The same questions as the model learns. @param {{ questions: any[], isRunning: boolean }} own */
function Samples({ questions, isRunning }) {
  const [shown, setShown] = useState(NUM_SAMPLES);
  const none = isRunning ? 'They come with the first evaluation.' : 'No sample was written.';
  if (!questions.length) return html`<p class="none">${none}</p>`;
  const one = (own) => {
    const answers = [...own.answers].sort((a, b) => a.step - b.step);
    const first = answers.find((each) => each.is_untrained);
    const newest = answers.findLast((each) => !each.is_untrained);
    const between = answers.filter((each) => each !== first && each !== newest).reverse();
    const later = html`<${Answer} name="trained" text=${isRunning ? 'not yet' : 'none'} />`;
    return html`<${Exchange} question=${own.question} reference=${own.reference?.replace(TURN_END, '')} key=${own.document}>
        ${first && sampled(first)} ${newest ? sampled(newest) : later}<//>
      ${between.length > 0 && html`<details><summary>${count(between.length, 'answer')} in between</summary>${between.map(sampled)}</details>`}`;
  };
  return html`<p class="lead">Held-out questions, answered while it learns.</p>
    ${questions.slice(0, shown).map(one)}
    <${More} shown=${Math.min(shown, questions.length)} total=${questions.length} noun="question" onMore=${() => setShown((own) => own + 10)} />`;
}

/** The output of the process. @param {{ log: any }} own */
function Log({ log }) {
  const where = html`<p class="none"><${Prose} text=${sentence(log.where || 'there is no log of this run')} /></p>`;
  if (!log.text) return where;
  return html`<details><summary>What the command prints, the newest at the end</summary>
    ${where}
    <pre class="code" tabindex="0" dir="auto">${visible(log.text.slice(-20_000))}</pre></details>`;
}
