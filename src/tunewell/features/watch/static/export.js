// Export: the model as files of other programs, with the proof that they answer as the trained model does.
import { html, useState } from './vendor/vendor.js';
import { download, send } from './api.js';
import { count, date, size, visible } from './format.js';
import { Job } from './new.js';
import { Bdi, Busy, Command, Problem, Prose, Sign, sentence, useLoaded } from './parts.js';

/** @param {{ session: any, run: any }} own */
export function Export({ session, run }) {
  const { data, error, again } = useLoaded(`export?${new URLSearchParams({ id: run.id })}`);
  if (error) return html`<${Problem} error=${error} onRetry=${again} />`;
  if (!data) return html`<${Busy} text="Reading the export" />`;
  return html`
    ${data.existing && html`<${Existing} own=${data.existing} run=${run} folder=${data.folder} />`}
    <section><h2>${data.existing ? 'Export again, or more' : 'Take it elsewhere'}</h2><${Targets} data=${data} run=${run} session=${session} onEnd=${again} /></section>`;
}

/** Choose targets and start. @param {{ data: any, run: any, session: any, onEnd: () => void }} own */
function Targets({ data, run, session, onEnd }) {
  const firsts = data.targets.filter((own) => own.is_recommended).map((own) => own.name);
  const [chosen, setChosen] = useState(/** @type {string[]} */ (firsts.length ? firsts : data.targets.slice(0, 1).map((own) => own.name)));
  const [precision, setPrecision] = useState('');
  const [state, setState] = useState(/** @type {{ job?: any, error?: any, command?: string }} */ (data.job?.status === 'running' ? { job: data.job } : {}));
  const isRunning = state.job && state.job.status === 'running';
  const exporting = (run.actions ?? []).find((own) => own.id === 'export');
  const picked = data.targets.filter((own) => chosen.includes(own.name));
  const total = picked.reduce((sum, own) => sum + (own.predicted_bytes ?? 0), 0);
  const hasPrecision = picked.some((own) => own.precisions.length > 0);
  const start = async (event) => {
    event.preventDefault();
    try {
      setState(await send('export', { id: run.id, to: chosen, gguf: (hasPrecision && precision) || null }));
    } catch (error) {
      setState({ error });
    }
  };
  const toggle = ({ target }) => setChosen((old) => (target.checked ? [...old, target.value] : old.filter((own) => own !== target.value)));
  const ended = (job) => {
    setState((old) => ({ ...old, job }));
    onEnd();
  };
  const impossible = session.is_read_only ? 'This page was started with `--read-only`.' : exporting && !exporting.is_possible ? sentence(exporting.why_not ?? '') : '';
  const command = state.command ?? `${picked[0]?.command.replace(/ --to .*$/, '') ?? 'tunewell export'} --to ${chosen.join(',')}${hasPrecision && precision ? ` --gguf ${precision}` : ''}`;
  return html`<form onSubmit=${start}>
    <fieldset><legend class="label">As</legend>
      ${data.targets.map((own) => html`<label class="option"><input type="checkbox" value=${own.name} checked=${chosen.includes(own.name)} onChange=${toggle} />
        <span><strong>${own.name}</strong>${own.is_recommended && html` <em class="badge PASS">recommended</em>`}<span class="hint"><${Prose} text=${own.about} />${own.predicted_bytes !== null && `; about ${size(own.predicted_bytes)}`}</span></span></label>`)}
    </fieldset>
    ${hasPrecision && html`<div class="fields"><label for="precision">Precision of the GGUF file</label>
      <select id="precision" value=${precision} onChange=${(event) => setPrecision(event.target.value)}>
        <option value="">as the config says</option>
        ${picked.flatMap((own) => own.precisions).filter((own, index, all) => all.indexOf(own) === index).map((own) => html`<option value=${own}>${own}</option>`)}
      </select></div>`}
    <p class="hint">${total > 0 && `About ${size(total)} will be written to `}${total > 0 && html`<code>${visible(data.folder)}</code>; `}${size(data.free_bytes)} are free. Each file is loaded again and compared with the trained model: that is the proof.</p>
    <${Problem} error=${state.error} />
    ${impossible && html`<div class="notice"><p><${Prose} text=${impossible} /></p></div>`}
    ${!isRunning && !impossible && html`<div class="actions"><button class="primary large" disabled=${!chosen.length}>Export and prove</button></div>`}
    ${state.job && html`<${Job} id=${state.job.id} key=${state.job.id} onEnd=${ended} />`}
    ${chosen.length > 0 && html`<${Command} command=${command} />`}
  </form>`;
}

/** What was exported: the proof, the files, and what to type. @param {{ own: any, run: any, folder: string }} own */
function Existing({ own, run, folder }) {
  const [error, setError] = useState(/** @type {any} */ (null));
  const save = (path) => download(path).catch(setError);
  const level = own.is_ok ? 'PASS' : 'FAIL';
  const bad = [...(own.failed?.links ?? []), ...own.links].filter((link) => !link.is_ok);
  return html`<section><h2>The export</h2>
    <div class=${`verdict ${level}`}><${Sign} name=${level} /><div>
      <p class="level"><strong>${own.is_ok ? 'PROVEN' : 'NOT PROVEN'}</strong> <span>${own.is_ok ? 'The files answer as the trained model does.' : 'Some files do not answer as the trained model does.'}</span></p>
      <p class="hint">${date(own.made_at)}, in <code>${visible(folder)}</code>. ${own.is_ok && 'It says that the files are right, not that the model is good: that is the verdict.'}</p></div></div>
    ${bad.map((link) => html`<div class="problem"><p><strong><${Bdi} text=${link.artefact} /> failed</strong></p>
      <ul class="notes">${link.checks.filter((check) => !check.is_ok).map((check) => html`<li>${check.name}: <${Prose} text=${check.words} /> ${check.bound && html`<span class="hint">(<${Prose} text=${check.bound} />)</span>`}</li>`)}</ul></div>`)}
    ${own.links.map((link) => html`<${Proof} link=${link} />`)}
    <h3>Files</h3><${Problem} error=${error} />
    <ul class="files">${own.artefacts.flatMap((artefact) => artefact.files.map((file) => html`<li key=${file.path}>
      <button type="button" class="entry" onClick=${() => save(file.path.startsWith(folder) ? file.path : `${folder}/${file.path}`)}><${Bdi} text=${file.path.split('/').pop()} /><span class="hint">${artefact.name}, ${size(file.bytes)}, save</span></button></li>`))}</ul>
    ${own.ollama && html`<${Command} label="To use it in Ollama, type" command=${own.ollama.command} />`}
    ${own.notes.map((text) => html`<p class="fine"><${Prose} text=${sentence(text)} /></p>`)}
  </section>`;
}

/** The checks of one artefact. @param {{ link: any }} own */
function Proof({ link }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${`Proof of ${link.artefact}`}><table class="stack proof" role="table">
    <caption><${Bdi} text=${link.artefact} />: ${link.is_ok ? 'proven' : 'failed'}, ${count(link.checks.length, 'check')}</caption>
    <tbody role="rowgroup">${link.checks.map((check) => html`<tr role="row"><th role="rowheader" scope="row"><span class=${`mark ${check.is_ok ? 'right' : 'wrong'}`}><${Sign} name=${check.is_ok ? 'right' : 'wrong'} />${check.name}</span></th>
      <td role="cell"><${Prose} text=${check.words} />${check.is_warning && ' (a warning)'}</td><td role="cell"><${Prose} text=${check.bound} /></td></tr>`)}</tbody>
  </table></div>`;
}
