// Parts that several screens share. Every text from outside is inserted as text, never as HTML.
import { html, useEffect, useRef, useState } from './vendor/vendor.js';
import { ApiError, get } from './api.js';
import { go } from './router.js';
import { count, setting, visible, words } from './format.js';

/** Texts that are read out by screen readers: one region for the whole page. @param {string} text */
export function announce(text) {
  const region = document.getElementById('live');
  if (region) region.textContent = text;
}

const SIGNS = {
  right: ['0 0 16 16', 'M2.5 8.5l3.5 4 7.5-9'],
  wrong: ['0 0 16 16', 'M3.5 3.5l9 9M12.5 3.5l-9 9'],
  PASS: ['0 0 48 48', 'M14 25l7 7 13-15'],
  WEAK: ['0 0 48 48', 'M24 18v12M24 36v.5'],
  UNPROVEN: ['0 0 48 48', 'M17 18c0-9 14-9 14 0 0 5-7 6-7 12M24 36v.5'],
  FAIL: ['0 0 48 48', 'M16 16l16 16M32 16L16 32'],
};
const WEAK_SHAPE = 'M24 4L46 43H2z';
const FAIL_SHAPE = 'M15 2h18l13 13v18L33 46H15L2 33V15z';
const CIRCLE = 'M24 2a22 22 0 1 0 0 44a22 22 0 1 0 0-44z';

/** A sign of the report: a mark, or the shape of a verdict. @param {{ name: keyof typeof SIGNS }} own */
export function Sign({ name }) {
  const [box, path] = SIGNS[name] ?? SIGNS.UNPROVEN;
  const shape = name === 'WEAK' ? WEAK_SHAPE : name === 'FAIL' ? FAIL_SHAPE : CIRCLE;
  return html`<svg class="sign" viewBox=${box} aria-hidden="true" focusable="false">
    ${box === '0 0 48 48' && html`<path class="shape" d=${shape} />`}
    <path class="stroke" d=${path} />
  </svg>`;
}

/** A sentence, with the parts between backticks as code. @param {{ text?: string | null }} own */
export function Prose({ text }) {
  const parts = visible(text).split('`');
  const isCode = (index) => index % 2 && index < parts.length - 1;
  return parts.map((part, index) => (isCode(index) ? html`<code dir="auto">${part}</code>` : part));
}

/** A name or text from outside, isolated so that its direction does not reorder the page. @param {{ text: unknown }} own */
export const Bdi = ({ text }) => html`<bdi>${visible(text).replace(/\s+/g, ' ')}</bdi>`;

/** A multi-line text from outside in a box that scrolls, and can be reached by keyboard if it is long.
 * @param {{ text?: string | null, label: string, class?: string, children?: unknown }} own */
export function Said({ text, label, class: name = '', children }) {
  const long = (text?.length ?? 0) > 500 || (text?.split('\n').length ?? 0) > 8;
  const box = long ? { tabIndex: 0, role: 'region', 'aria-label': label } : {};
  const shown = children ?? (text?.trim() ? visible(text) : '(empty)');
  return html`<div class=${`said ${name} ${text?.trim() || children ? '' : 'nothing'}`} dir="auto" ...${box}>${shown}</div>`;
}

/** A question with the expected answer and the answers of models.
 * @param {{ question: string, reference?: string, contains?: string, head?: unknown, children?: any }} own */
export function Exchange({ question, reference, contains, head, children }) {
  const expected = (name, text) =>
    text &&
    html`<div class="reference"><span class="label">${name}</span><${Said} text=${text} label=${name} /></div>`;
  const isAlone = [children].flat(2).filter(Boolean).length < 2;
  return html`<article class="exchange">
    ${head && html`<h3>${head}</h3>`}
    <div class="question"><${Said} text=${question} label="Question" /></div>
    ${expected('Expected', reference)}${expected('Must contain', contains)}
    <div class=${`sides ${isAlone ? 'alone' : ''}`}>${children}</div>
  </article>`;
}

/** An answer with whose it is, whether it is right, and what is the matter with it.
 * @param {{ name: unknown, text?: string, right?: boolean | null, wrong?: string, faults?: string[], hint?: unknown, children?: unknown, side?: string }} own */
export function Answer({ name, text, right, wrong = 'wrong', faults = [], hint, children, side }) {
  const mark = typeof right === 'boolean' && (right ? 'right' : 'wrong');
  return html`<div class="answer" data-side=${side}>
    <p class="label"><span>${name}</span>
      ${mark && html`<span class=${`mark ${mark}`}><${Sign} name=${mark} />${right ? 'right' : wrong}</span>`}
      ${faults.map((fault) => html`<span>${fault}</span>`)}</p>
    <${Said} text=${text} label="Answer">${children}<//>
    ${hint && html`<p class="hint">${hint}</p>`}
  </div>`;
}

/** A search field whose text is in the address, a moment after it was typed.
 * @param {{ place: import('./router.js').Place, label: string }} own */
export function Search({ place, label }) {
  const timer = useRef(0);
  const type = ({ target }) => {
    clearTimeout(timer.current);
    timer.current = setTimeout(() => go({ ...place, q: target.value }, { replace: true }), 250);
  };
  return html`<div><label for="q">${label}</label>
    <input id="q" type="search" defaultValue=${place.q ?? ''} onInput=${type} /></div>`;
}

/** The command that does the same, with a button that copies it.
 * @param {{ command?: string | null, label?: string, note?: string }} own */
export function Command({ command, label = 'The same in a terminal', note }) {
  const [copied, setCopied] = useState('');
  const code = useRef(/** @type {HTMLElement | null} */ (null));
  if (!command) return null;
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(command);
      setCopied('copied');
    } catch {
      getSelection()?.selectAllChildren(/** @type {HTMLElement} */ (code.current));
      setCopied('selected');
    }
    announce('The command is on the clipboard');
    setTimeout(() => setCopied(''), 2000);
  };
  return html`<div class="command">
    <span class="label">${label}</span>
    <div class="line">
      <code dir="ltr" ref=${code}>${visible(command)}</code>
      <button type="button" class="quiet" onClick=${copy} aria-label=${`Copy: ${command}`}>${copied || 'Copy'}</button>
    </div>
    ${note && html`<p class="hint"><${Prose} text=${note} /></p>`}
  </div>`;
}

/** An error with its place and the fix. @param {{ error?: any, onRetry?: () => void, title?: string }} own */
export function Problem({ error, onRetry, title }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => box.current?.scrollIntoView?.({ block: 'nearest' }), [error]);
  if (!error) return null;
  return html`<div class="problem" role="alert" ref=${box}>
    <p><strong><${Prose} text=${title ?? sentence(error.message)} /></strong></p>
    ${title && html`<p><${Prose} text=${error.message} /></p>`}
    ${error.where && html`<p class="where">Where: <${Prose} text=${error.where} /></p>`}
    ${error.fix && html`<p>What to do: <${Prose} text=${error.fix} /></p>`}
    ${onRetry && html`<button type="button" onClick=${onRetry}>Try again</button>`}
  </div>`;
}

/** @param {string} text */
export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** Something that takes a moment, said only if it does. @param {{ text?: string }} own */
export function Busy({ text = 'Reading' }) {
  return html`<p class="busy" role="status"><span class="dots" aria-hidden="true"></span>${text} …</p>`;
}

/** The progress of something that is under way. @param {{ share?: number | null, label: string, text?: unknown }} own */
export function Bar({ share, label, text }) {
  const value = typeof share === 'number' ? { value: Math.min(1, Math.max(0, share)) } : {};
  return html`<div class="progress">
    <progress max="1" ...${value} aria-label=${label}></progress>
    ${text && html`<span class="hint">${text}</span>`}
  </div>`;
}

/** The verdict as a word with its sign. @param {{ level?: string | null }} own */
export function VerdictWord({ level }) {
  if (!level) return null;
  const known = /** @type {keyof typeof SIGNS} */ (level in SIGNS ? level : 'UNPROVEN');
  return html`<span class=${`badge ${known}`}><${Sign} name=${known} />${level}</span>`;
}

/** Name and value pairs. @param {{ pairs: [string, unknown][] }} own */
export const Facts = ({ pairs }) =>
  html`<dl class="facts">
    ${pairs
      .filter(([, value]) => value !== null && value !== undefined && value !== '')
      .map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;

/** Settings with their values and reasons. @param {{ chosen: { key: string, value: unknown, because: string }[] }} own */
export function Reasons({ chosen }) {
  const head = (name) => html`<th role="columnheader" scope="col">${name}</th>`;
  const row = ({ key, value, because }) =>
    html`<tr role="row"><th role="rowheader" scope="row">${words(key)}</th>
      <td role="cell">${setting(value)}</td><td role="cell"><${Prose} text=${because} /></td></tr>`;
  return html`<table class="stack" role="table">
    <thead role="rowgroup"><tr role="row">${['Setting', 'Value', 'Reason'].map(head)}</tr></thead>
    <tbody role="rowgroup">${chosen.map(row)}</tbody></table>`;
}

/** A table of numbers; columns from the second on are aligned to the right.
 * @param {{ caption?: string, head: string[], rows: unknown[][], foot?: unknown[], left?: number }} own */
export const Numbers = ({ caption, head, rows, foot, left = 1 }) => {
  const side = (column) => (column >= left ? 'n' : '');
  const cells = (row) =>
    row.map((cell, column) =>
      column
        ? html`<td class=${side(column)}>${cell}</td>`
        : html`<th scope="row" class=${side(0)}>${cell}</th>`,
    );
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption ?? head.join(', ')}>
    <table class="numbers slim">
      ${caption && html`<caption>${caption}</caption>`}
      <thead><tr>${head.map((name, column) => html`<th scope="col" class=${side(column)}>${name}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr>${cells(row)}</tr>`)}</tbody>
      ${foot && html`<tfoot><tr>${cells(foot)}</tr></tfoot>`}
    </table>
  </div>`;
};

/** Load a path of the API; `again` loads it once more. `keep` shows the last answer while the next one is on its way.
 * @template T @param {string | null} path @param {{ every?: number, keep?: boolean }} [options] */
export function useLoaded(path, { every = 0, keep = true } = {}) {
  const [state, setState] = useState({
    path: /** @type {string | null} */ (null),
    data: /** @type {any} */ (null),
    error: /** @type {ApiError | null} */ (null),
  });
  const [round, setRound] = useState(0);
  useEffect(() => {
    if (path === null) return;
    const controller = new AbortController();
    let timer = 0;
    const load = async () => {
      if (!document.hidden || !round) {
        try {
          const data = await get(path, controller.signal);
          setState({ path, data, error: null });
        } catch (error) {
          if (controller.signal.aborted) return;
          const own = error instanceof ApiError ? error : new ApiError(0, { what: String(error) });
          const isKept = (old) => old.path === path && !own.status;
          setState((old) => ({ path, data: isKept(old) ? old.data : null, error: own }));
        }
      }
      if (every && !controller.signal.aborted) timer = setTimeout(load, every * 1000);
    };
    load();
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, [path, round, every]);
  const isOwn = state.path === path || keep;
  return {
    data: isOwn ? state.data : null,
    error: state.path === path ? state.error : null,
    again: () => setRound((own) => own + 1),
  };
}

/** How many of many things are shown, with a button for more. @param {{ shown: number, total: number, noun: string, onMore: () => void }} own */
export function More({ shown, total, noun, onMore }) {
  if (shown >= total) return null;
  return html`<p class="more-line">
    <button type="button" onClick=${onMore}>Show more</button>
    <span class="hint">${count(shown)} of ${count(total, noun)} are shown</span>
  </p>`;
}
