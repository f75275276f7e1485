// New: from a file to a start. What was chosen is in the address, so that going back takes back the last answer.
import { html, useEffect, useRef, useState } from './vendor/vendor.js';
import { ApiError, get, refusal, upload, work } from './api.js';
import { count, duration, number, size, visible, words } from './format.js';
import { Bar, Bdi, Busy, Command, Facts, Numbers, Problem, Prose, Reasons } from './parts.js';
import { announce, sentence, useLoaded } from './parts.js';
import { go } from './router.js';

const STAGES = ['Rows', 'Questions', 'Model', 'Check and start'];
const SETTINGS = {
  'train.epochs': 'Times over all rows',
  'train.learning_rate': 'Learning rate',
  'train.max_steps': 'Stop after so many steps',
  'method.rank': 'LoRA rank',
  seed: 'Random seed',
};
const MAX_ENTRIES = 10_000;
const MAX_TOKENS = 4000;

/** The choices in the address as the body of a request. @param {import('./router.js').Place} place */
function requestOf(place) {
  const { data = '', answers = '[]', model = null, method = 'lora', name = null } = place;
  const known = { data, model, method, name };
  try {
    return { ...known, answers: JSON.parse(answers), settings: JSON.parse(place.settings ?? '{}') };
  } catch {
    return { ...known, answers: [], settings: {} };
  }
}

/** Send a request whose answer reports its progress. It is sent again when it changes.
 * @param {string} path @param {any} body */
function useAnswer(path, body) {
  const key = JSON.stringify([path, body]);
  const [state, setState] = useState(/** @type {any} */ ({ key: '' }));
  const [round, setRound] = useState(0);
  useEffect(() => {
    const controller = new AbortController();
    setState({ key });
    const tell = (own) => controller.signal.aborted || setState({ key, ...own });
    const progress = (own) => tell({ progress: own });
    const result = (own) => tell({ result: own });
    work(path, body, progress, controller.signal).then(result, (error) => tell({ error }));
    return () => controller.abort();
  }, [key, round]);
  return { ...(state.key === key ? state : { key }), again: () => setRound((own) => own + 1) };
}

/** What a request is doing. @param {{ progress?: any, text?: string }} own */
function Progress({ progress, text = 'A moment' }) {
  if (!progress) return html`<${Busy} text=${text} />`;
  const { stage, done, total } = progress;
  const far = done ? `: ${count(done)}${total ? ` of ${count(total)}` : ''}` : ' …';
  return html`<${Bar} share=${total ? done / total : null} label=${stage} text=${sentence(stage) + far} />`;
}

/** @param {{ session: any, place: import('./router.js').Place }} own */
export function New({ session, place }) {
  const request = requestOf(place);
  const stage = !request.data ? 0 : place.step === 'model' ? 2 : place.step === 'plan' ? 3 : 1;
  const to = (changes) => go({ ...place, ...changes });
  useEffect(() => {
    document.title = `New model: ${STAGES[stage]} · tunewell`;
  }, [stage]);
  if (session.is_read_only) {
    return html`<h1 tabindex="-1">New model</h1>
      <p class="none">This page was started with <code>--read-only</code>, so it starts nothing.</p>`;
  }
  const Screen = [Rows, Questions, Models, Check][stage];
  return html`<p class="eyebrow">New model${request.data && html`: <${Bdi} text=${request.data} />`}</p>
    <ol class="stages" aria-label="Steps">
      ${STAGES.map((name, index) => html`<li class=${index < stage ? 'done' : ''} aria-current=${index === stage ? 'step' : undefined}><span>${index + 1}</span> ${name}</li>`)}
    </ol>
    <${Screen} request=${request} session=${session} to=${to} />`;
}

/** All files of what was dropped, also those in folders. @param {DataTransfer} transfer @returns {Promise<File[]>} */
async function filesOf(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  /** @type {File[]} */
  const files = [];
  const walk = async (entry) => {
    if (files.length >= MAX_ENTRIES || entry.name.startsWith('.')) return;
    const file = (give, fail) => entry.file(give, fail);
    if (entry.isFile) return void files.push(await new Promise(file));
    for (const reader = entry.createReader(); ;) {
      const some = await new Promise((give, fail) => reader.readEntries(give, fail));
      if (!some.length) return;
      for (const own of some) await walk(own);
    }
  };
  if (!entries.length) return [...transfer.files];
  for (const entry of entries) await walk(entry);
  return files;
}

/** Throw a refusal for files that the server would not take. @param {File[]} files @param {any} session */
function requireSendable(files, { limits, folder }) {
  if (!files.length) throw refusal('no file was dropped', 'drop a file with rows, or choose one');
  const instead = `copy it into \`${folder}\`, and choose it below`;
  const many = `${count(files.length)} files are too many`;
  if (files.length > limits.upload_files) throw refusal(many, instead);
  const large = files.find((file) => file.size > limits.upload_bytes);
  const what = `\`${large?.name}\` is larger than ${size(limits.upload_bytes)}`;
  if (large) throw refusal(what, instead);
}

/** Stage 1: drop files, choose them, or name what lies in the folder.
 * @param {{ session: any, to: (changes: Record<string, string>) => void }} own */
function Rows({ session, to }) {
  const onChoose = (data) => to({ data });
  const [isOver, setOver] = useState(false);
  const [sent, setSent] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const files = useRef(/** @type {HTMLInputElement | null} */ (null));
  const folder = useRef(/** @type {HTMLInputElement | null} */ (null));

  const send = async (own) => {
    setError(null);
    try {
      requireSendable(own, session);
      let answer = { data: '', into: own.length > 1 ? 'new' : '' };
      for (const [index, file] of own.entries()) {
        setSent({ name: file.name, number: index, total: own.length });
        const query = new URLSearchParams({ name: file.name });
        if (answer.into) query.set('into', answer.into);
        answer = await upload(`uploads?${query}`, file);
      }
      announce('The rows were sent');
      onChoose(answer.data);
    } catch (failure) {
      setError(failure);
    } finally {
      setSent(null);
    }
  };
  const drop = async (event) => {
    event.preventDefault();
    setOver(false);
    if (event.dataTransfer) await filesOf(event.dataTransfer).then(send, setError);
  };
  const over = (event) => {
    event.preventDefault();
    setOver(true);
  };
  const picked = (event) => send([...event.target.files]);
  return html`<h1 tabindex="-1">Which rows shall it learn from?</h1>
    <div class=${`card drop ${isOver ? 'over' : ''}`} onDragOver=${over} onDragLeave=${() => setOver(false)} onDrop=${drop}>
      <h2>Drop a file here</h2>
      <p class="hint">A table of questions and answers (CSV, Excel, JSONL, Parquet), an exported chat
        (WhatsApp, ChatGPT, Slack …), or documents. The file is copied into <bdi>${session.folder}</bdi>;
        it does not leave this computer.</p>
      <div class="actions">
        <button type="button" class="primary" onClick=${() => files.current?.click()}>Choose a file</button>
        <button type="button" onClick=${() => folder.current?.click()}>Choose a folder</button>
      </div>
      <input ref=${files} type="file" multiple hidden onChange=${picked} aria-label="Files" />
      <input ref=${folder} type="file" webkitdirectory hidden onChange=${picked} aria-label="Folder" />
      ${sent && html`<${Bar} share=${sent.total > 1 ? sent.number / sent.total : null} label="Sending" text=${`Sending ${visible(sent.name)}`} />`}
    </div>
    <${Problem} error=${error} />
    <h2 class="later">Or take what is already in this folder</h2>
    <${Files} onChoose=${onChoose} />`;
}

/** The files of the folder that can be rows. @param {{ onChoose: (data: string) => void }} own */
function Files({ onChoose }) {
  const [folder, setFolder] = useState('');
  const { data, error } = useLoaded(`files?${new URLSearchParams({ folder })}`);
  const known = (data?.entries ?? []).filter((own) => own.kind !== 'other');
  const above = () => html`<p class="states"><code dir="auto">${visible(folder)}</code>
    <button type="button" class="quiet" onClick=${() => setFolder(data?.parent ?? '')}>Up</button>
    <button type="button" class="quiet" onClick=${() => onChoose(folder)}>Take the whole folder</button></p>`;
  const entry = ({ path, name, kind, bytes }) => {
    const open = () => (kind === 'folder' ? setFolder(path) : onChoose(path));
    const about = kind === 'folder' ? 'folder' : `${kind}, ${size(bytes)}`;
    return html`<li><button type="button" class="entry" onClick=${open}><${Bdi} text=${name} /><span class="hint">${about}</span></button></li>`;
  };
  return html`<${Problem} error=${error} />
    ${folder && above()}
    ${data && !known.length && html`<p class="none">Nothing here that could be rows.</p>`}
    <ul class="files">${known.map(entry)}</ul>
    ${data?.is_cut && html`<p class="fine">Only the first files are listed.</p>`}`;
}

/** Stage 2: one question at a time, with the first rows as they are read.
 * @param {{ request: any, session: any, to: (changes: Record<string, string>) => void }} own */
function Questions({ request, session, to }) {
  const { data, answers } = request;
  const answer = useAnswer('new/read', { data, answers });
  const { result } = answer;
  if (!result) return html`<${Waiting} answer=${answer} title="Reading the rows" />`;
  if (result.question)
    return html`<${Question} result=${result} request=${request} to=${to} key=${answers.length} />`;
  const isBad = result.rows?.problem || !result.number;
  return html`<h1 tabindex="-1">${isBad ? 'These rows cannot be read' : `${count(result.number, 'row')} will be read like this`}</h1>
    ${result.pauses && html`<p class="lead"><${Prose} text=${result.pauses} /></p>`}
    ${result.is_documents && html`<${Documents} data=${data} session=${session} />`}
    <${Preview} rows=${result.rows} />
    ${result.found?.length > 0 && html`<details><summary>What was found out about the file</summary><${Reasons} chosen=${result.found} /></details>`}
    <div class="actions">
      ${!isBad && html`<button type="button" class="primary large" onClick=${() => to({ step: 'model', name: result.suggested_name ?? '' })}>${result.is_documents ? 'Train on these texts' : 'This is right'}</button>`}
      <button type="button" onClick=${() => to({ data: '', answers: '', step: '' })}>Other rows</button>
    </div>
    <${Command} command=${result.command} />`;
}

/** What is under way, or why it failed. @param {{ answer: any, title: string }} own */
function Waiting({ answer: { error, progress, again }, title }) {
  if (!error) return html`<h1 tabindex="-1">${title}</h1><${Progress} progress=${progress} />`;
  return html`<h1 tabindex="-1">This does not work yet</h1><${Problem} error=${error} onRetry=${again} /><${Back} />`;
}

const Back = () =>
  html`<div class="actions"><button type="button" onClick=${() => history.back()}>Back</button></div>`;

/** One question with its options, and the rows as they would be read now.
 * @param {{ result: any, request: any, to: (changes: Record<string, string>) => void }} own */
function Question({ result: { question, rows }, request, to }) {
  const answer = (event) => {
    event.preventDefault();
    const value = new FormData(event.target).get('option');
    const { key } = question;
    if (!key) to({ answers: JSON.stringify([...request.answers, value]) });
    else to({ settings: JSON.stringify({ ...request.settings, [key]: value }) });
  };
  const shown = question.shown.map((pair) => pair.map(visible));
  const option = ([value, label], index) => html`<label class="card option">
    <input type="radio" name="option" value=${value} defaultChecked=${index === 0} required />
    <span dir="auto">${visible(label)}${index === 0 && html`<span class="hint">likeliest</span>`}</span></label>`;
  return html`<form class="question-form" onSubmit=${answer}>
      <h1 tabindex="-1" id="question"><${Prose} text=${question.text} /></h1>
      ${shown.length > 0 && html`<${Facts} pairs=${shown} />`}
      <fieldset aria-labelledby="question">${question.options.map(option)}</fieldset>
      <div class="actions"><button class="primary">Next</button></div>
    </form>
    ${rows && html`<h2 class="later">The first rows, as they would be read now</h2><${Preview} rows=${rows} />`}
    <${Back} />`;
}

/** The first rows as they are read: as a table, or as messages. @param {{ rows?: any }} own */
function Preview({ rows }) {
  if (!rows) return null;
  if (rows.problem) return html`<${Problem} error=${new ApiError(400, rows.problem)} />`;
  const cell = (text) => html`<td><span class="cell" dir="auto">${visible(text)}</span></td>`;
  const head = (name) => html`<th scope="col"><${Bdi} text=${name} /></th>`;
  const message = ({ role, content }) =>
    html`<p class="message"><span class="label">${role}</span><span dir="auto">${visible(content)}</span></p>`;
  const chats = rows.conversations ?? [];
  return html`<div class="scroll" tabindex="0" role="region" aria-label="The first rows">
      <table class="preview"><thead><tr>${(rows.columns ?? []).map(head)}</tr></thead>
        <tbody>${(rows.rows ?? []).map((row) => html`<tr>${row.map(cell)}</tr>`)}</tbody></table></div>
    ${chats.length > 0 && html`<p class="label">As the model will read them</p>`}
    ${chats.map((messages) => html`<div class="card chat">${messages.map(message)}</div>`)}`;
}

/** Documents can be looked up instead of learned. @param {{ data: string, session: any }} own */
function Documents({ data, session }) {
  return html`<div class="notice calm">
    <p><strong>These are documents, not conversations.</strong></p>
    <p>Training on them teaches their tone, and facts only loosely. To get answers with their sources, let a model look them up instead: nothing is trained.</p>
    <${LookUp} data=${data} session=${session} canStart=${session.features.index} />
  </div>`;
}

/** Make documents searchable instead. @param {{ data: string, session: any, canStart: boolean, command?: string }} own */
function LookUp({ data, canStart, command }) {
  const [state, setState] = useState(/** @type {any} */ ({}));
  const start = async () => {
    setState({ isSent: true });
    await work('new/index', { data }, () => {}).then(setState, (error) => setState({ error }));
  };
  return html`${canStart && !state.job && html`<div class="actions"><button type="button" onClick=${start} disabled=${state.isSent}>Look up instead</button></div>`}
    <${Problem} error=${state.error} />
    ${state.job && html`<${Job} id=${state.job.id} />`}
    <${Command} command=${state.command ?? command} />`;
}

/** A job until it ends: what it does, its error, and what it printed. @param {{ id: string, onEnd?: (job: any) => void }} own */
export function Job({ id, onEnd }) {
  const [job, setJob] = useState(/** @type {any} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  useEffect(() => {
    let timer = 0;
    const ask = async () => {
      try {
        const own = await get(`job?${new URLSearchParams({ id })}`);
        setJob(own);
        setError(null);
        if (own.status !== 'running') return onEnd?.(own);
      } catch (failure) {
        setError(failure);
      }
      timer = setTimeout(ask, 1000);
    };
    ask();
    return () => clearTimeout(timer);
  }, [id]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!job) return html`<${Busy} text="Starting" />`;
  const state = job.status === 'lost' ? 'ended without a result' : job.status;
  return html`<div class="job" role="status">
    ${job.status === 'running' ? html`<${Busy} text=${visible(job.words || `${sentence(job.kind)} is starting`)} />` : html`<p><strong>${sentence(job.kind)}: ${state}.</strong> ${job.status !== 'failed' && visible(job.words)}</p>`}
    ${job.error && html`<${Problem} error=${new ApiError(400, job.error)} />`}
  </div>`;
}

/** What a model needs, in one line. @param {any} model */
function needs(model) {
  const time = model.seconds;
  const parts = [
    model.parameters && `${number(model.parameters / 1e6, 3)}M parameters`,
    model.peak_bytes && `${size(model.peak_bytes)} of memory`,
    time && `about ${duration(time.expected)}`,
    model.on_disk && `on this disk (${model.on_disk})`,
    !model.on_disk && model.download_bytes && `${size(model.download_bytes)} to download`,
  ];
  return parts.filter(Boolean).join(' · ');
}

/** Stage 3: the recommended model, and others. @param {{ request: any, session: any, to: (changes: Record<string, string>) => void }} own */
function Models({ request, session, to }) {
  const { data, answers } = request;
  const answer = useAnswer('new/models', { data, answers });
  const { result } = answer;
  const [other, setOther] = useState('');
  if (!result)
    return html`<${Waiting} answer=${answer} title="Comparing models for this computer" />`;
  const shown = [...(result.recommended ? [result.recommended] : []), ...result.alternatives];
  const chosen = request.model ?? result.recommended?.name ?? result.alternatives[0]?.name ?? '';
  const submit = (event) => {
    event.preventDefault();
    const form = new FormData(/** @type {HTMLFormElement} */ (event.target));
    const name = other.trim() || String(form.get('model') ?? '');
    if (name) to({ step: 'plan', model: name, method: String(form.get('method') ?? 'lora') });
  };
  const option = (own) => html`<label class="card option">
    <input type="radio" name="model" value=${own.name} defaultChecked=${own.name === chosen} disabled=${!own.fits} />
    <span><strong><${Bdi} text=${own.name} /></strong>${own.name === result.recommended?.name && html` <em class="badge PASS">recommended</em>`}
      <span class="hint">${needs(own)}</span>
      ${own.name === result.recommended?.name && result.because && html`<span class="hint"><${Prose} text=${sentence(result.because)} /></span>`}
      ${own.good_for && html`<span class="hint">Good for: ${own.good_for}${own.license && `; licence ${own.license}`}</span>`}
      ${own.problem && html`<span class="hint bad">${sentence(own.problem)}</span>`}</span>
  </label>`;
  return html`<form onSubmit=${submit}>
    <h1 tabindex="-1">Which model shall learn?</h1>
    <p class="lead">A larger model knows more and takes longer. The estimates are for these rows on <bdi>${session.machine.device}</bdi>.</p>
    <${Problem} error=${result.problem && new ApiError(400, result.problem)} />
    <fieldset><legend class="unseen">Model</legend>${shown.map(option)}
      ${result.others.length > 0 && html`<details><summary>${count(result.others.length, 'other model')}</summary>${result.others.map(option)}</details>`}
    </fieldset>
    <details open=${shown.length === 0}><summary>Another model, or another method</summary>
      <div class="fields">
        <label for="other">Model: a folder, a <code>.gguf</code> file, a hub name, <code>ollama:NAME</code> or <code>package:NAME</code></label>
        <input id="other" value=${other} onInput=${(event) => setOther(event.target.value)} spellcheck="false" autocomplete="off" />
        <label for="method">Method</label>
        <select id="method" name="method">${session.methods.map((own) => html`<option value=${own.name} selected=${own.name === request.method}>${own.name}: ${own.about}</option>`)}</select>
      </div>
    </details>
    <div class="actions"><button class="primary large">Use this model</button><button type="button" onClick=${() => history.back()}>Back</button></div>
    <${Command} command=${result.command} />
  </form>`;
}

/** Stage 4: what the model sees, what was dropped, the plan; start. @param {{ request: any, session: any, to: (changes: Record<string, string>) => void }} own */
function Check({ request, session, to }) {
  const answer = useAnswer('new/draft', request);
  const { result } = answer;
  const [start, setStart] = useState(/** @type {any} */ ({}));
  if (!result) return html`<${Waiting} answer=${answer} title="Making the plan" />`;
  if (result.question) return html`<${Question} result=${result} request=${request} to=${to} />`;
  const begin = async () => {
    setStart({ isSent: true });
    const begun = ({ run }) => go({ screen: 'run', id: run });
    const progress = (own) => setStart({ isSent: true, progress: own });
    await work('new/start', request, progress).then(begun, (error) => setStart({ error }));
  };
  const { prediction, rows, dropped, task } = result;
  const { seconds: time, memory } = prediction ?? {};
  const range = time && `${duration(time.low)} to ${duration(time.high)}`;
  const needed = memory && `about ${size(memory.peak_bytes)}`;
  const because = task && html`<span class="hint"><${Prose} text=${task.because} /></span>`;
  const facts = /** @type {[string, unknown][]} */ ([
    ['Rows', count(rows.number, 'row')],
    ['Kept for the test', rows.kept_for_testing],
    ['Model', html`<${Bdi} text=${result.model?.name ?? request.model} />`],
    ['Time', time && `about ${duration(time.expected)} (${range})`],
    ['Memory', prediction?.fits === false ? `${needed}: more than is free` : needed],
    ['What is judged', task && html`${words(task.value)} ${because}`],
  ]);
  const lookUp = (own) => html`<div class="notice calm">
    <p><strong>Look up instead?</strong> <${Prose} text=${sentence(own.words)} /></p>
    <${LookUp} data=${request.data} session=${session} canStart=${own.can_start} command=${own.command} /></div>`;
  const buttons = () => html`<div class="actions">
    <button type="button" class="primary large" onClick=${begin} disabled=${Boolean(result.blocked)}>Start training</button>
    <button type="button" onClick=${() => history.back()}>Back</button></div>`;
  return html`<h1 tabindex="-1">Ready to start</h1>
    <${Facts} pairs=${facts} />
    ${rows.too_few && html`<div class="notice"><p><strong>Few rows.</strong> <${Prose} text=${sentence(rows.too_few)} /></p></div>`}
    ${rows.remarks.map((text) => html`<p class="fine"><${Prose} text=${text} /></p>`)}
    ${result.look_up && lookUp(result.look_up)}
    <${Problem} error=${result.blocked && new ApiError(409, result.blocked)} onRetry=${answer.again} />
    <${Problem} error=${start.error} />
    ${start.isSent ? html`<${Progress} progress=${start.progress} text="Starting" />` : buttons()}
    <section><h2>What the model sees</h2>
      <p class="lead"><mark>Marked</mark> is what it learns to write. The rest it only reads.</p>
      ${result.sees.map((own) => html`<${Tokens} document=${own} key=${own.index} />`)}
    </section>
    <section><h2>What was dropped</h2><${Dropped} dropped=${dropped} sampled=${result.num_sampled} /></section>
    <section><h2>The plan</h2><${Settings} request=${request} to=${to} />
      <details><summary>${count(result.plan.length, 'setting')}, each with its reason</summary>
        <${Reasons} chosen=${result.plan} />
      </details>
      <details><summary>The file that is written: <code>${visible(result.config.path)}</code></summary><pre class="code" tabindex="0">${visible(result.config.text)}</pre></details>
    </section>
    ${result.commands.map((own, index) => html`<${Command} command=${own} label=${index ? 'then' : 'The same in a terminal'} />`)}`;
}

/** A conversation as its tokens, with those that are learned marked. @param {{ document: any }} own */
function Tokens({ document: own }) {
  /** @type {{ text: string, is_supervised: boolean }[]} */
  const spans = [];
  for (const token of own.tokens.slice(0, MAX_TOKENS)) {
    const last = spans[spans.length - 1];
    if (last?.is_supervised === token.is_supervised) last.text += token.text;
    else spans.push({ ...token });
  }
  return html`<div class="said sees" dir="auto" tabindex="0" role="region" aria-label=${`Row ${own.row}`}>
    ${spans.map((span) => (span.is_supervised ? html`<mark>${visible(span.text)}</mark>` : html`<span>${visible(span.text)}</span>`))}</div>
    <p class="fine">Row ${count(own.row)} of <${Bdi} text=${own.source} />, ${count(own.tokens.length, 'token')}</p>`;
}

/** @param {{ dropped: any[], sampled: number }} own */
function Dropped({ dropped, sampled }) {
  if (!dropped.length) return html`<p>None of the first ${count(sampled, 'row')}.</p>`;
  const why = ({ reason, words: meaning, example }) =>
    html`${words(reason)}<span class="hint">${meaning}</span>${example && html`<span class="hint">Row ${count(example.row)}: <bdi>${visible(example.text)}</bdi></span>`}`;
  const rows = dropped.map((own) => [why(own), count(own.number)]);
  return html`<${Numbers} caption=${`Of the first ${count(sampled, 'row')}`} head=${['Reason', 'Rows']} rows=${rows} />`;
}

/** Settings that can be changed here. @param {{ request: any, to: (changes: Record<string, string>) => void }} own */
function Settings({ request, to }) {
  const change = (event) => {
    event.preventDefault();
    const form = new FormData(/** @type {HTMLFormElement} */ (event.target));
    const typed = (key) => String(form.get(key) ?? '').trim();
    const given = Object.keys(SETTINGS).filter(typed);
    const read = (text) => (Number.isNaN(Number(text)) ? text : Number(text));
    const settings = Object.fromEntries(given.map((key) => [key, read(typed(key))]));
    to({ settings: given.length ? JSON.stringify(settings) : '', name: typed('name') });
  };
  const field = ([key, label]) => html`<label for=${key}>${label} <code>${key}</code></label>
    <input id=${key} name=${key} inputmode="decimal" placeholder="as planned" defaultValue=${request.settings[key] ?? ''} autocomplete="off" />`;
  return html`<details open=${Object.keys(request.settings).length > 0}><summary>Change settings</summary>
    <form class="fields" onSubmit=${change}>
      <label for="name">Name of the folder</label><input id="name" name="name" defaultValue=${request.name ?? ''} spellcheck="false" autocomplete="off" />
      ${Object.entries(SETTINGS).map(field)}
      <div class="actions"><button>Plan again</button></div>
    </form></details>`;
}
