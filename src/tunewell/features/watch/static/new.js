// New: from a file to a start. What was chosen is in the address, so that going back takes back the last answer.
import { html, useEffect, useRef, useState } from './vendor/vendor.js';
import { ApiError, get, streamed, upload } from './api.js';
import { count, duration, number, percent, setting, size, visible, words } from './format.js';
import { Bar, Bdi, Busy, Command, Facts, Numbers, Problem, Prose, Reasons } from './parts.js';
import { announce, sentence, useLoaded } from './parts.js';
import { go } from './router.js';

const STAGES = ['Rows', 'Questions', 'Model', 'Check and start'];
const SETTINGS = {
  'train.epochs': ['Times over all rows', 'number'],
  'train.learning_rate': ['Learning rate', 'text'],
  'train.max_steps': ['Stop after so many steps', 'number'],
  'method.rank': ['LoRA rank', 'number'],
  seed: ['Random seed', 'number'],
};
const MAX_ENTRIES = 10_000;
const MAX_TOKENS = 4000;

/** The choices in the address as the body of a request. @param {import('./router.js').Place} place */
function requestOf(place) {
  const parsed = (text, none) => {
    try {
      return JSON.parse(text);
    } catch {
      return none;
    }
  };
  return {
    data: place.data ?? '',
    answers: parsed(place.answers ?? '[]', []),
    model: place.model || null,
    method: place.method || 'lora',
    name: place.name || null,
    settings: parsed(place.settings ?? '{}', {}),
  };
}

/** Send a request whose answer reports its progress. It is sent again when it changes.
 * @param {string} path @param {any} body */
function useAnswer(path, body) {
  const key = JSON.stringify([path, body]);
  const [state, setState] = useState(/** @type {{ key: string, progress?: any, result?: any, error?: ApiError }} */ ({ key: '' }));
  const [round, setRound] = useState(0);
  useEffect(() => {
    const controller = new AbortController();
    setState({ key });
    const read = async () => {
      for await (const { name, data } of streamed(path, body, controller.signal)) {
        if (name === 'progress') setState({ key, progress: data });
        else if (name === 'result') setState({ key, result: data });
        else if (name === 'error') setState({ key, error: new ApiError(400, data.error) });
      }
    };
    read().catch((error) => {
      if (!controller.signal.aborted) setState({ key, error });
    });
    return () => controller.abort();
  }, [key, round]);
  return { ...(state.key === key ? state : { key }), again: () => setRound((own) => own + 1) };
}

/** What a request is doing. @param {{ progress?: any, text: string }} own */
function Progress({ progress, text }) {
  if (!progress) return html`<${Busy} text=${text} />`;
  const share = progress.total ? progress.done / progress.total : null;
  const done = progress.done ? `${sentence(progress.stage)}: ${count(progress.done)}` : sentence(progress.stage);
  return html`<${Bar} share=${share} label=${progress.stage} text=${progress.total ? `${done} of ${count(progress.total)}` : `${done} …`} />`;
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
  const screens = [
    html`<${Rows} session=${session} onChoose=${(data) => to({ data })} />`,
    html`<${Questions} request=${request} session=${session} to=${to} />`,
    html`<${Models} request=${request} session=${session} to=${to} />`,
    html`<${Check} request=${request} session=${session} to=${to} />`,
  ];
  return html`<p class="eyebrow">New model${request.data && html`: <${Bdi} text=${request.data} />`}</p>
    <ol class="stages" aria-label="Steps">
      ${STAGES.map((name, index) => html`<li class=${index < stage ? 'done' : ''} aria-current=${index === stage ? 'step' : undefined}><span>${index + 1}</span> ${name}</li>`)}
    </ol>
    ${screens[stage]}`;
}

/** All files of what was dropped, also those in folders. @param {DataTransfer} transfer @returns {Promise<File[]>} */
async function filesOf(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter((entry) => entry !== null);
  /** @type {File[]} */
  const files = [];
  const walk = async (entry) => {
    if (files.length >= MAX_ENTRIES || entry.name.startsWith('.')) return;
    if (entry.isFile) return void files.push(await new Promise((give, fail) => entry.file(give, fail)));
    const reader = entry.createReader();
    for (;;) {
      const some = await new Promise((give, fail) => reader.readEntries(give, fail));
      if (!some.length) return;
      for (const own of some) await walk(own);
    }
  };
  if (!entries.length) return [...transfer.files];
  for (const entry of entries) await walk(entry);
  return files;
}

/** Stage 1: drop files, choose them, or name what lies in the folder.
 * @param {{ session: any, onChoose: (data: string) => void }} own */
function Rows({ session, onChoose }) {
  const [isOver, setOver] = useState(false);
  const [sent, setSent] = useState(/** @type {{ name: string, share: number, number: number, total: number } | null} */ (null));
  const [error, setError] = useState(/** @type {any} */ (null));
  const files = useRef(/** @type {HTMLInputElement | null} */ (null));
  const folder = useRef(/** @type {HTMLInputElement | null} */ (null));

  const send = async (own) => {
    setError(null);
    if (!own.length) return setError(new ApiError(400, { what: 'no file was dropped', fix: 'drop a file with rows, or choose one' }));
    if (own.length > session.limits.upload_files) {
      return setError(new ApiError(400, { what: `${count(own.length)} files are too many for the page`, fix: 'put them into the folder yourself, and choose the folder below' }));
    }
    const large = own.find((file) => file.size > session.limits.upload_bytes);
    if (large) {
      return setError(new ApiError(413, {
        what: `\`${large.name}\` is larger than ${size(session.limits.upload_bytes)}`,
        fix: `copy it into \`${session.folder}\`, and choose it below: then nothing has to be sent`,
      }));
    }
    try {
      let into = own.length > 1 ? 'new' : '';
      let data = '';
      for (const [index, file] of own.entries()) {
        const query = new URLSearchParams({ name: file.name, ...(into && { into }) });
        const progress = (share) => setSent({ name: file.name, share, number: index + 1, total: own.length });
        progress(0);
        const answer = await upload(`uploads?${query}`, file, progress);
        into = answer.into ?? '';
        data = answer.data;
      }
      announce('The rows were sent');
      onChoose(data);
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
    <div class=${`drop ${isOver ? 'over' : ''}`} onDragOver=${over} onDragLeave=${() => setOver(false)} onDrop=${drop}>
      ${sent
        ? html`<${Bar} share=${sent.share} label="Sending" text=${`${visible(sent.name)}, ${percent(sent.share)}${sent.total > 1 ? ` (file ${count(sent.number)} of ${count(sent.total)})` : ''}`} />`
        : html`<p class="big">Drop a file here</p>
            <p class="hint">A table of questions and answers (CSV, Excel, JSONL, Parquet), an exported chat (WhatsApp, ChatGPT, Slack …), or documents.
              The file is copied into <bdi>${session.folder}</bdi>; it does not leave this computer.</p>
            <div class="actions">
              <button type="button" class="primary" onClick=${() => files.current?.click()}>Choose a file</button>
              <button type="button" onClick=${() => folder.current?.click()}>Choose a folder</button>
            </div>
            <input ref=${files} type="file" multiple hidden onChange=${picked} data-files aria-label="Files" />
            <input ref=${folder} type="file" webkitdirectory hidden onChange=${picked} aria-label="Folder" />`}
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
  const KINDS = { rows: 'rows', documents: 'documents', folder: 'folder' };
  return html`<${Problem} error=${error} />
    ${data && html`<div class="files">
      ${folder && html`<p class="path"><button type="button" class="quiet" onClick=${() => setFolder(data.parent ?? '')}>Up</button> <code dir="auto">${visible(folder)}</code>
        <button type="button" class="quiet" onClick=${() => onChoose(folder)}>Take the whole folder</button></p>`}
      ${known.length === 0 && html`<p class="none">Nothing here that could be rows.</p>`}
      <ul>${known.map((own) => html`<li key=${own.path}>
        <button type="button" class="entry" onClick=${() => (own.kind === 'folder' ? setFolder(own.path) : onChoose(own.path))}>
          <${Bdi} text=${own.name} /><span class="hint">${KINDS[own.kind]}${own.bytes !== null && own.kind !== 'folder' ? `, ${size(own.bytes)}` : ''}</span>
        </button></li>`)}</ul>
      ${data.is_cut && html`<p class="fine">Only the first files are listed.</p>`}
    </div>`}`;
}

/** Stage 2: one question at a time, with the first rows as they are read.
 * @param {{ request: any, session: any, to: (changes: Record<string, string>) => void }} own */
function Questions({ request, session, to }) {
  const { data, answers } = request;
  const { result, error, progress, again } = useAnswer('new/read', { data, answers });
  if (error) {
    return html`<h1 tabindex="-1">These rows cannot be read</h1><${Problem} error=${error} onRetry=${again} />
      <div class="actions"><button type="button" onClick=${() => to({ data: '', answers: '' })}>Other rows</button></div>`;
  }
  if (!result) return html`<h1 tabindex="-1">Reading the rows</h1><${Progress} progress=${progress} text="Reading" />`;
  if (result.question) {
    return html`<${Question} question=${result.question} key=${answers.length} onAnswer=${(value) => to({ answers: JSON.stringify([...answers, value]) })} />
      <h2 class="later">The first rows, as they would be read now</h2><${Preview} rows=${result.rows} />
      <${Back} onBack=${() => history.back()} />`;
  }
  const found = (result.found ?? []).map((own) => [words(own.key), setting(own.value), html`<${Prose} text=${own.because} />`]);
  return html`<h1 tabindex="-1">${count(result.number, 'row')} will be read like this</h1>
    ${result.is_documents && html`<${Documents} data=${data} session=${session} />`}
    <${Preview} rows=${result.rows} />
    ${found.length > 0 && html`<details><summary>What was found out about the file</summary><${Reasons} head=${['Setting', 'Value', 'Reason']} rows=${found} /></details>`}
    <div class="actions">
      <button type="button" class="primary large" onClick=${() => to({ step: 'model', name: result.suggested_name ?? '' })}>${result.is_documents ? 'Train on these texts' : 'This is right'}</button>
      <button type="button" onClick=${() => to({ data: '', answers: '', step: '' })}>Other rows</button>
    </div>
    <${Command} command=${result.command} />`;
}

/** @param {{ onBack: () => void }} own */
const Back = ({ onBack }) => html`<div class="actions"><button type="button" onClick=${onBack}>Back</button></div>`;

/** One question with its options. @param {{ question: any, onAnswer: (value: string) => void }} own */
export function Question({ question, onAnswer }) {
  const answer = (event) => {
    event.preventDefault();
    onAnswer(String(new FormData(/** @type {HTMLFormElement} */ (event.target)).get('option')));
  };
  return html`<form class="question-form" onSubmit=${answer}>
    <h1 tabindex="-1" id="question"><${Prose} text=${question.text} /></h1>
    ${question.shown.length > 0 && html`<${Facts} pairs=${question.shown.map((own) => [visible(own.name), visible(own.text)])} />`}
    <fieldset aria-labelledby="question">
      ${question.options.map((own, index) => html`<label class="option">
        <input type="radio" name="option" value=${own.value} defaultChecked=${index === 0} required />
        <span dir="auto">${visible(own.label)}${index === 0 && html`<em class="hint"> likeliest</em>`}</span></label>`)}
    </fieldset>
    <div class="actions"><button class="primary">Next</button></div>
  </form>`;
}

/** The first rows as they are read: as a table, or as messages. @param {{ rows?: any }} own */
function Preview({ rows }) {
  if (!rows) return null;
  if (rows.problem) return html`<${Problem} error=${new ApiError(400, rows.problem)} />`;
  const cell = (text) => html`<span class="cell" dir="auto">${visible(text)}</span>`;
  const chats = rows.conversations ?? [];
  return html`${rows.columns?.length > 0 && html`<div class="scroll" tabindex="0" role="region" aria-label="The first rows">
      <table class="preview">
        <thead><tr>${rows.columns.map((name) => html`<th scope="col"><${Bdi} text=${name} /></th>`)}</tr></thead>
        <tbody>${rows.rows.map((row) => html`<tr>${row.map((text) => html`<td>${cell(text)}</td>`)}</tr>`)}</tbody>
      </table></div>`}
    ${chats.length > 0 && html`<div class="chats"><p class="label">As the model will read them</p>
      ${chats.map((messages) => html`<div class="chat">
        ${messages.map((own) => html`<p class=${`message ${own.role}`}><span class="label">${own.role}</span><span dir="auto">${visible(own.content)}</span></p>`)}
      </div>`)}</div>`}`;
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
  const [state, setState] = useState(/** @type {{ job?: any, error?: any, isSent?: boolean, command?: string }} */ ({}));
  const start = async () => {
    setState({ isSent: true });
    try {
      for await (const { name, data: own } of streamed('new/index', { data }, new AbortController().signal)) {
        if (name === 'result') setState({ job: own.job, command: own.command });
        if (name === 'error') setState({ error: new ApiError(400, own.error) });
      }
    } catch (error) {
      setState({ error });
    }
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
  if (!job) return html`<${Problem} error=${error} />${!error && html`<${Busy} text="Starting" />`}`;
  const ended = { done: 'done', failed: 'failed', lost: 'ended without a result' };
  const state = ended[job.status];
  return html`<div class="job" role="status">
    ${job.status === 'running' ? html`<${Busy} text=${visible(job.words || `${sentence(job.kind)} is starting`)} />` : html`<p><strong>${sentence(job.kind)}: ${state}.</strong> ${job.status !== 'failed' && visible(job.words)}</p>`}
    ${job.error && html`<${Problem} error=${new ApiError(400, job.error)} />`}
  </div>`;
}

/** What a model needs, in one line. @param {any} model */
function needs(model) {
  const time = model.seconds;
  return [
    model.parameters && `${number(model.parameters / 1e6, 3)}M parameters`,
    model.peak_bytes && `${size(model.peak_bytes)} of memory`,
    time && `about ${duration(time.expected)}`,
    model.on_disk ? `on this disk (${model.on_disk})` : model.download_bytes && `${size(model.download_bytes)} to download`,
  ].filter(Boolean).join(' · ');
}

/** Stage 3: the recommended model, and others. @param {{ request: any, session: any, to: (changes: Record<string, string>) => void }} own */
function Models({ request, session, to }) {
  const { data, answers } = request;
  const { result, error, progress, again } = useAnswer('new/models', { data, answers });
  const [other, setOther] = useState('');
  if (error) return html`<h1 tabindex="-1">Which model?</h1><${Problem} error=${error} onRetry=${again} /><${Back} onBack=${() => history.back()} />`;
  if (!result) return html`<h1 tabindex="-1">Which model?</h1><${Progress} progress=${progress} text="Comparing models for these rows on this computer" />`;
  const shown = [...(result.recommended ? [result.recommended] : []), ...result.alternatives];
  const chosen = request.model ?? result.recommended?.name ?? result.alternatives[0]?.name ?? '';
  const submit = (event) => {
    event.preventDefault();
    const form = new FormData(/** @type {HTMLFormElement} */ (event.target));
    const name = other.trim() || String(form.get('model') ?? '');
    if (name) to({ step: 'plan', model: name, method: String(form.get('method') ?? 'lora') });
  };
  const option = (own) => html`<label class="option model">
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
  const { result, error, progress, again } = useAnswer('new/draft', request);
  const [start, setStart] = useState(/** @type {{ progress?: any, error?: any, isSent?: boolean }} */ ({}));
  if (error) return html`<h1 tabindex="-1">This cannot be planned</h1><${Problem} error=${error} onRetry=${again} /><${Back} onBack=${() => history.back()} />`;
  if (!result) return html`<h1 tabindex="-1">Making the plan</h1><${Progress} progress=${progress} text="Reading the first rows as this model sees them" />`;
  if (result.question) {
    return html`<${Question} question=${result.question} onAnswer=${(value) => to({ answers: JSON.stringify([...request.answers, value]) })} />
      <${Back} onBack=${() => history.back()} />`;
  }
  const begin = async () => {
    setStart({ isSent: true });
    try {
      for await (const { name, data } of streamed('new/start', request, new AbortController().signal)) {
        if (name === 'progress') setStart({ isSent: true, progress: data });
        if (name === 'error') setStart({ error: new ApiError(400, data.error) });
        if (name === 'result') go({ screen: 'run', id: data.run, job: data.job?.id });
      }
    } catch (failure) {
      setStart({ error: failure });
    }
  };
  const { prediction, rows, dropped } = result;
  const time = prediction?.seconds;
  const facts = /** @type {[string, unknown][]} */ ([
    ['Rows', count(rows.number, 'row')],
    ['Kept for the test', rows.kept_for_testing],
    ['Model', html`<${Bdi} text=${result.model?.name ?? request.model} />`],
    ['Time', time && `about ${duration(time.expected)} (${duration(time.low)} to ${duration(time.high)})`],
    ['Memory', prediction && `about ${size(prediction.memory.peak_bytes)}${prediction.fits ? '' : ': more than is free'}`],
    ['What is judged', result.task && html`${words(result.task.value)} <span class="hint"><${Prose} text=${result.task.because} /></span>`],
  ]);
  return html`<h1 tabindex="-1">Ready to start</h1>
    <${Facts} pairs=${facts} />
    ${rows.too_few && html`<div class="notice"><p><strong>Few rows.</strong> <${Prose} text=${sentence(rows.too_few)} /></p></div>`}
    ${rows.remarks.map((text) => html`<p class="fine"><${Prose} text=${text} /></p>`)}
    ${result.look_up && html`<div class="notice calm"><p><strong>Look up instead?</strong> <${Prose} text=${sentence(result.look_up.words)} /></p>
      <${LookUp} data=${request.data} session=${session} canStart=${result.look_up.can_start} command=${result.look_up.command} /></div>`}
    <${Problem} error=${result.blocked && new ApiError(409, result.blocked)} onRetry=${again} />
    <${Problem} error=${start.error} />
    ${start.isSent && !start.error
      ? html`<${Progress} progress=${start.progress} text="Starting" />`
      : html`<div class="actions"><button type="button" class="primary large" onClick=${begin} disabled=${Boolean(result.blocked)}>Start training</button>
          <button type="button" onClick=${() => history.back()}>Back</button></div>`}
    <section><h2>What the model sees</h2>
      <p class="lead"><mark>Marked</mark> is what it learns to write. The rest it only reads.</p>
      ${result.sees.map((own) => html`<${Tokens} document=${own} key=${own.document} />`)}
    </section>
    <section><h2>What was dropped</h2><${Dropped} dropped=${dropped} sampled=${result.num_sampled} /></section>
    <section><h2>The plan</h2><${Settings} request=${request} to=${to} />
      <details><summary>${count(result.settings.length + result.plan.length, 'setting')}, each with its reason</summary>
        <${Reasons} head=${['Setting', 'Value', 'Reason']} rows=${[...result.settings, ...result.plan].map((own) => [words(own.key), setting(own.value), html`<${Prose} text=${own.because} />`])} />
      </details>
      <details><summary>The file that is written: <code>${visible(result.config.path)}</code></summary><pre class="code" tabindex="0">${visible(result.config.text)}</pre></details>
    </section>
    ${result.commands.map((own, index) => html`<${Command} command=${own} label=${index ? 'then' : 'The same in a terminal'} />`)}`;
}

/** A conversation as its tokens, with those that are learned marked. @param {{ document: any }} own */
function Tokens({ document: own }) {
  /** @type {{ text: string, is_trained: boolean }[]} */
  const spans = [];
  for (const token of own.tokens.slice(0, MAX_TOKENS)) {
    const last = spans[spans.length - 1];
    if (last?.is_trained === token.is_trained) last.text += token.text;
    else spans.push({ ...token });
  }
  return html`<div class="said sees" dir="auto" tabindex="0" role="region" aria-label=${`Row ${own.row}`}>
    ${spans.map((span) => (span.is_trained ? html`<mark>${visible(span.text)}</mark>` : html`<span>${visible(span.text)}</span>`))}</div>
    <p class="fine">Row ${count(own.row)} of <${Bdi} text=${own.source} />, ${count(own.tokens.length, 'token')}</p>`;
}

/** @param {{ dropped: any[], sampled: number }} own */
function Dropped({ dropped, sampled }) {
  if (!dropped.length) return html`<p>None of the first ${count(sampled, 'row')}.</p>`;
  const rows = dropped.map((own) => [
    html`${words(own.reason)}<span class="hint">${own.words}</span>${own.example && html`<span class="hint">Row ${count(own.example.row)}: <bdi>${visible(own.example.text)}</bdi></span>`}`,
    count(own.number),
  ]);
  return html`<${Numbers} caption=${`Of the first ${count(sampled, 'row')}`} head=${['Reason', 'Rows']} rows=${rows} />`;
}

/** Settings that can be changed here. @param {{ request: any, to: (changes: Record<string, string>) => void }} own */
function Settings({ request, to }) {
  const change = (event) => {
    event.preventDefault();
    const form = new FormData(/** @type {HTMLFormElement} */ (event.target));
    const given = Object.keys(SETTINGS).map((key) => [key, String(form.get(key) ?? '').trim()]).filter(([, text]) => text);
    const settings = Object.fromEntries(given.map(([key, text]) => [key, Number.isNaN(Number(text)) ? text : Number(text)]));
    to({ settings: given.length ? JSON.stringify(settings) : '', name: String(form.get('name') || request.name || '') });
  };
  return html`<details open=${Object.keys(request.settings).length > 0}><summary>Change settings</summary>
    <form class="fields" onSubmit=${change}>
      <label for="name">Name of the folder</label><input id="name" name="name" defaultValue=${request.name ?? ''} spellcheck="false" autocomplete="off" />
      ${Object.entries(SETTINGS).map(([key, [label]]) => html`<label for=${key}>${label} <code>${key}</code></label>
        <input id=${key} name=${key} inputmode="decimal" placeholder="as planned" defaultValue=${request.settings[key] ?? ''} autocomplete="off" />`)}
      <div class="actions"><button>Plan again</button></div>
    </form></details>`;
}
