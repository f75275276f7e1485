// Numbers and texts for people, as the command line writes them (core/units.py, core/html.py).

const BINARY = ['bytes', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
/** @type {Record<string, string>} */
const NOT_FINITE = { nan: 'not a number', inf: 'infinite', '-inf': 'minus infinite' };
const UNSEEN = new RegExp(
  '[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u00ad\\u061c\\u115f\\u1160\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e' +
    '\\u2060-\\u206f\\u3164\\ufeff\\ufff0-\\ufffb\\ufffe\\uffff\\ufdd0-\\ufdef\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}]' +
    '|[\\ud800-\\udfff]',
  'gu',
);
const MAX_CHARS = 20_000;
const ENGLISH = 'en-US';

/** @typedef {number | string | null | undefined} Number_ A number; JSON has `"nan"`, `"inf"`, `"-inf"` as strings. */

/** Whether a value of a record is a finite number.
 * @param {unknown} value @returns {value is number} */
export const isFinite_ = (value) => typeof value === 'number' && Number.isFinite(value);

/** What a number that is not finite is called, or '' for a finite one.
 * @param {Number_} value */
export const notFinite = (value) => NOT_FINITE[String(value)] ?? '';

/** @param {number} value @param {number} low @param {number} [high] */
const digits = (value, low, high = low) =>
  value.toLocaleString(ENGLISH, { minimumFractionDigits: low, maximumFractionDigits: high });

/** `1,234 rows`, `1 row`. @param {number} value @param {string} [noun] @param {string} [plural] */
export function count(value, noun, plural) {
  const number = value.toLocaleString(ENGLISH);
  return noun ? `${number} ${Math.abs(value) === 1 ? noun : (plural ?? `${noun}s`)}` : number;
}

/** A loss with four decimals, in words if it is not finite. @param {Number_} value */
export function loss(value) {
  if (!isFinite_(value)) return notFinite(value) || '–';
  return Math.abs(value) < 1e6 ? digits(value, 4) : exponent(value, 3);
}

/** Any number with up to `significant` digits. @param {Number_} value */
export function number(value, significant = 4) {
  if (!isFinite_(value)) return notFinite(value) || '–';
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e9)) return exponent(value, 2);
  return value.toLocaleString(ENGLISH, {
    maximumSignificantDigits: Number.isInteger(value) ? 15 : significant,
  });
}

/** `3.2e-5`, without zeros at the end. @param {number} value @param {number} places */
const exponent = (value, places) => value.toExponential(places).replace(/\.?0*e\+?/, 'e');

/** A fraction as a percentage; 100% and 0% only if exact. @param {Number_} share */
export function percent(share) {
  if (!isFinite_(share)) return notFinite(share) || '–';
  let value = Math.round(share * 1000) / 10;
  if (share < 1 && value >= 100) value = 99.9;
  return share > 0 && value < 0.1 ? 'under 0.1%' : `${digits(value, 1)}%`;
}

/** `4.0 MiB`. @param {Number_} bytes */
export function size(bytes) {
  if (!isFinite_(bytes)) return '–';
  let value = bytes;
  let unit = 0;
  for (; Math.abs(value) >= 1023.95 && unit < BINARY.length - 1; unit++) value /= 1024;
  return unit ? `${digits(value, 1)} ${BINARY[unit]}` : count(Math.round(value), 'byte');
}

/** `12 ms`, `3.4 s`, `1 m 15 s`, `1 h 50 m`, `2 d 3 h`. @param {Number_} seconds @returns {string} */
export function duration(seconds) {
  if (!isFinite_(seconds)) return notFinite(seconds) || '–';
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const two = (part) => String(part).padStart(2, '0');
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${two(whole % 60)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} m`;
  const hours = Math.round(seconds / 3600);
  return `${count(Math.floor(hours / 24))} d ${hours % 24} h`;
}

/** How long ago: `just now`, `5 m 02 s ago`, `3 d 4 h ago`. @param {string} iso */
export function ago(iso) {
  const seconds = (Date.now() - Date.parse(iso)) / 1000;
  return seconds < 45 ? 'just now' : `${duration(seconds)} ago`;
}

/** `18 November 2026, 18:14`. @param {string} iso */
export function date(iso) {
  const when = new Date(iso);
  if (Number.isNaN(when.valueOf())) return iso;
  return when.toLocaleString('en-GB', { dateStyle: 'long', timeStyle: 'short' });
}

/** A value of a setting of any type. @param {unknown} value @returns {string} */
export function setting(value) {
  if (value === null || value === undefined) return 'none';
  if (typeof value === 'boolean') return value ? 'yes' : 'no';
  if (typeof value === 'number') return number(value, 6);
  if (Array.isArray(value) && value.every((own) => typeof own !== 'object')) {
    return value.map(setting).join(', ') || 'none';
  }
  return visible(typeof value === 'object' ? JSON.stringify(value) : String(value));
}

/** A text with invisible characters as code points, cut after 20,000 characters. @param {unknown} text */
export function visible(text) {
  const whole = String(text ?? '');
  const point = (own) => (own.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, '0');
  const shown = whole.slice(0, MAX_CHARS).replace(UNSEEN, (own) => `[U+${point(own)}]`);
  const left = whole.length - MAX_CHARS;
  return left > 0 ? `${shown}\n[${count(left, 'more character')}]` : shown;
}

/** `some_name` as words. @param {string} name */
export const words = (name) => name.replaceAll('_', ' ');
