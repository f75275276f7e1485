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
  const [chosen, setChosen] = useState(/** @type {string[]} */ (firsts));
  const [precision, setPrecision] = useState('');
  const [state, setState] = useState(/** @type {any} */ ({ job: data.job }));
  const isRunning = state.job && state.job.status === 'running';
  const exporting = (run.actions ?? []).find((own) => own.id === 'export');
  const picked = data.targets.filter((own) => chosen.includes(own.name));
  const total = picked.reduce((sum, own) => sum + (own.predicted_bytes ?? 0), 0);
  const hasPrecision = picked.some((own) => own.precisions.length > 0);
  const start = async (event) => {
    event.preventDefault();
    try {
      const gguf = (hasPrecision && precision) || null;
      setState(await send('act', { id: run.id, action: 'export', to: chosen, gguf }));
    } catch (error) {
      setState({ error });
    }
  };
  const toggle = ({ target: { value } }) =>
    setChosen(chosen.includes(value) ? chosen.filter((own) => own !== value) : [...chosen, value]);
  const ended = (job) => {
    setState((old) => ({ ...old, job }));
    onEnd();
  };
  const why = exporting?.is_possible === false ? sentence(exporting.why_not ?? '') : '';
  const impossible = session.is_read_only ? 'This page was started with `--read-only`.' : why;
  const asked = `${exporting?.command} --to ${chosen.join(',')}${hasPrecision && precision && ` --gguf ${precision}`}`;
  const precisions = () => html`<div class="fields">
    <label for="precision">Precision of the GGUF file</label>
    <select id="precision" value=${precision} onChange=${({ target }) => setPrecision(target.value)}>
      <option value="">as the config says</option>
      ${[...new Set(picked.flatMap((own) => own.precisions))].map((own) => html`<option value=${own}>${own}</option>`)}
    </select></div>`;
  const option = (own) => html`<label class="card option">
    <input type="checkbox" value=${own.name} checked=${chosen.includes(own.name)} onChange=${toggle} />
    <span><strong>${own.name}</strong>${own.is_recommended && html` <em class="badge PASS">recommended</em>`}<span class="hint">
      <${Prose} text=${own.about} />${own.predicted_bytes !== null && `; about ${size(own.predicted_bytes)}`}</span></span></label>`;
  return html`<form onSubmit=${start}>
    <fieldset><legend class="label">As</legend>
      ${data.targets.map(option)}
    </fieldset>
    ${hasPrecision && precisions()}
    <p class="hint">${total > 0 && `About ${size(total)} will be written to `}${total > 0 && html`<code>${visible(data.folder)}</code>; `}${size(data.free_bytes)} are free. Each file is loaded again and compared with the trained model: that is the proof.</p>
    <${Problem} error=${state.error} />
    ${impossible && html`<div class="notice"><p><${Prose} text=${impossible} /></p></div>`}
    ${!isRunning && !impossible && html`<div class="actions"><button class="primary large" disabled=${!chosen.length}>Export and prove</button></div>`}
    ${state.job && html`<${Job} id=${state.job.id} key=${state.job.id} onEnd=${ended} />`}
    ${chosen.length > 0 && html`<${Command} command=${state.command ?? asked} />`}
  </form>`;
}

/** What was exported: the proof, the files, and what to type. @param {{ own: any, run: any, folder: string }} own */
function Existing({ own, run, folder }) {
  const [error, setError] = useState(/** @type {any} */ (null));
  const saved = (name, { path, bytes }) => {
    const save = () =>
      download(path.startsWith(folder) ? path : `${folder}/${path}`).catch(setError);
    return html`<li><button type="button" class="entry" onClick=${save}><${Bdi} text=${path.split('/').pop()} /><span class="hint">${name}, ${size(bytes)}, save</span></button></li>`;
  };
  const level = own.is_ok ? 'PASS' : 'FAIL';
  const bad = [...(own.failed?.links ?? []), ...own.links].filter((link) => !link.is_ok);
  return html`<section><h2>The export</h2>
    <div class=${`verdict ${level}`}><${Sign} name=${level} /><div>
      <p class="level"><strong>${own.is_ok ? 'PROVEN' : 'NOT PROVEN'}</strong> <span>${own.is_ok ? 'The files answer as the trained model does.' : 'Some files do not answer as the trained model does.'}</span></p>
      <p class="hint">${date(own.made_at)}, in <code>${visible(folder)}</code>. ${own.is_ok && 'It says that the files are right, not that the model is good: that is the verdict.'}</p></div></div>
    ${bad.map((link) => html`<div class="problem"><${Proof} link=${link} /></div>`)}
    ${own.links.filter((link) => link.is_ok).map((link) => html`<${Proof} link=${link} />`)}
    <h3>Files</h3><${Problem} error=${error} />
    <ul class="files">${own.artefacts.flatMap(({ name, files }) => files.map((file) => saved(name, file)))}</ul>
    ${own.ollama && html`<${Command} label="To use it in Ollama, type" command=${own.ollama.command} />`}
    ${own.notes.map((text) => html`<p class="fine"><${Prose} text=${sentence(text)} /></p>`)}
  </section>`;
}

/** The checks of one artefact. @param {{ link: any }} own */
function Proof({ link }) {
  const row = ({ name, is_ok: isOk, is_warning: isWarning, words, bound }) => html`<tr role="row">
    <th role="rowheader" scope="row"><span class=${`mark ${isOk ? 'right' : 'wrong'}`}><${Sign} name=${isOk ? 'right' : 'wrong'} />${name}</span></th>
    <td role="cell"><${Prose} text=${words} />${isWarning && ' (a warning)'}</td><td role="cell"><${Prose} text=${bound} /></td></tr>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${`Proof of ${link.artefact}`}><table class="stack proof" role="table">
    <caption><${Bdi} text=${link.artefact} />: ${link.is_ok ? 'proven' : 'failed'}, ${count(link.checks.length, 'check')}</caption>
    <tbody role="rowgroup">${link.checks.map(row)}</tbody>
  </table></div>`;
}
