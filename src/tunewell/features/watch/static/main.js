// The page of `tunewell watch`. It keeps no state of its own: screens read records through the API and start commands.
import { html, render, useEffect, useErrorBoundary } from './vendor/vendor.js';
import { access, findToken, get, isOnline, useToken } from './api.js';
import { Home } from './home.js';
import { New } from './new.js';
import { Bdi, Busy, Problem, useLoaded } from './parts.js';
import { Link, place } from './router.js';
import { Run } from './run.js';

const SCREENS = { home: Home, new: New, run: Run };
const RETRY_SECONDS = 2;
const ENDED = {
  message: 'the server has ended; runs go on without it',
  fix: 'this page tries again; after a restart, open the new address that `tunewell watch` prints',
};

function App() {
  if (access.value === 'missing' || access.value === 'refused') return html`<${Locked} />`;
  return html`<${Shell} />`;
}

/** The frame of every screen: where one is, and what is the matter with the server. */
function Shell() {
  const { data: session, error, again } = useLoaded('session');
  const Screen = SCREENS[place.value.screen] ?? NotFound;
  useEffect(() => {
    if (isOnline.value) return;
    const timer = setInterval(() => get('session').then(again, () => {}), RETRY_SECONDS * 1000);
    return () => clearInterval(timer);
  }, [isOnline.value]);
  const key = `${place.value.screen} ${place.value.id ?? ''}`;
  const skip = () => /** @type {HTMLElement | null} */ (document.querySelector('main'))?.focus();
  return html`
    <button type="button" class="skip" onClick=${skip}>Skip to the content</button>
    <header class="top">
      <${Link} to=${{ screen: 'home' }} class="brand">tunewell<//>
      ${session && html`<span class="folder" title=${session.folder}><${Bdi} text=${session.folder} /></span>`}
      ${session?.is_read_only && html`<span class="badge">read only</span>`}
    </header>
    <${Problem} error=${isOnline.value ? null : ENDED} />
    <main tabindex="-1">
      ${session && html`<${Whole} key=${key}><${Screen} session=${session} place=${place.value} /><//>`}
      ${!session && html`<h1 tabindex="-1">tunewell</h1><${Problem} error=${isOnline.value ? error : null} onRetry=${again} />`}
      ${!session && !error && html`<${Busy} text="Opening" />`}
    </main>
    ${session && html`<footer><p><bdi>${session.version}</bdi> on <bdi>${session.machine?.device}</bdi>. Nothing leaves this computer.</p></footer>`}
  `;
}

/** A screen, or what went wrong in it. @param {{ children?: unknown }} own */
function Whole({ children }) {
  const [error, again] = useErrorBoundary((failure) => console.error(failure));
  if (!error) return children;
  return html`<h1 tabindex="-1">This screen cannot be shown</h1>
    <${Problem} error=${{ message: String(error), fix: 'in a terminal, `tunewell runs` shows the same; please report this' }} onRetry=${again} />`;
}

function NotFound() {
  return html`<h1 tabindex="-1">There is no such page</h1>
    <p class="lead"><${Link} to=${{ screen: 'home' }}>All runs of this folder<//></p>`;
}

/** What one sees without the token: how to come in. */
function Locked() {
  const open = (event) => {
    event.preventDefault();
    const field = /** @type {HTMLInputElement} */ (document.getElementById('token'));
    useToken(field.value);
  };
  const isOld = access.value === 'refused';
  return html`<main class="narrow">
    <p class="eyebrow">tunewell watch</p>
    <h1 tabindex="-1">${isOld ? 'This page belongs to a server that has ended' : 'Open the address from the terminal'}</h1>
    <p class="lead">
      ${isOld ? 'Each start of ' : 'The terminal in which '}<code>tunewell watch</code>
      ${isOld ? ' has a new address. ' : ' was started shows an address that ends in '}
      ${isOld ? 'Open the one that the terminal shows now, or paste it here.' : html`<code>#token=…</code>. Open it, or paste it here.`}
    </p>
    <form onSubmit=${open} class="row-form">
      <label for="token">Address or token</label>
      <input id="token" type="password" autocomplete="off" spellcheck="false" required />
      <button class="primary">Open</button>
    </form>
    <p class="hint">Without it, other programs and web pages on this computer could read your rows and start work.</p>
  </main>`;
}

addEventListener('hashchange', () => location.hash.startsWith('#token=') && location.reload());
await findToken();
document.getElementById('page')?.replaceChildren();
render(html`<${App} />`, /** @type {HTMLElement} */ (document.getElementById('page')));
