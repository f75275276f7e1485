// Where the page is: in the fragment of the address, so that every screen can be linked, reloaded and shared.
import { computed, html, signal } from './vendor/vendor.js';

/** @typedef {{ screen: string, [name: string]: string }} Place */

const fragment = signal(location.hash);

/** The screen and its values: `#/run?id=college/run&tab=verdict`. */
export const place = computed(() => {
  const [, screen, query] = /^#\/(\w*)\??(.*)$/s.exec(fragment.value) ?? [];
  const values = Object.fromEntries(new URLSearchParams(query ?? ''));
  return /** @type {Place} */ ({ ...values, screen: screen || 'home' });
});

addEventListener('popstate', () => (fragment.value = location.hash));
addEventListener('hashchange', () => (fragment.value = location.hash));

/** The address of a place. @param {Place} at */
export function link({ screen, ...values }) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value)).toString();
  return `#/${screen === 'home' ? '' : screen}${query ? `?${query}` : ''}`;
}

/** Go to a place. `replace` changes values of the same screen, as while someone types.
 * @param {Place} at @param {{ replace?: boolean, isSame?: boolean }} [options] */
export function go(at, { replace = false, isSame = replace } = {}) {
  history[replace ? 'replaceState' : 'pushState'](null, '', link(at));
  fragment.value = location.hash;
  if (isSame) return;
  scrollTo(0, 0);
  // A screen reader starts to read at the heading of the new screen.
  setTimeout(() => document.querySelector('h1')?.focus({ preventScroll: true }), 50);
}

/** A link to a place of the page. With a key held, the browser opens a tab as usual.
 * @param {{ to: Place, class?: string, current?: boolean, children?: unknown }} own */
export function Link({ to, class: name, current, children }) {
  const follow = (event) => {
    if (event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    go(to);
  };
  return html`<a href=${link(to)} class=${name} onClick=${follow} aria-current=${current ? 'page' : undefined}>${children}</a>`;
}
