// The curves of a run: drawn by uPlot, said in words, and in a table for those who do not see them.
import { html, uPlot, useEffect, useRef, useState } from './vendor/vendor.js';
import { count, duration, isFinite_, loss, notFinite, number, size } from './format.js';
import { Numbers } from './parts.js';

/** @typedef {(number | string | null)[]} Column */
/** @typedef {{ step: number, loss: number | string, is_best?: boolean }} Evaluation */
/** @typedef {{ step: number, name: string, severity: string, action: string, words: string }} Healing */
/** @typedef {{ columns: Record<string, Column>, held_out: Evaluation[], healing: Healing[], is_reduced?: boolean }} Curve */

/** What can be drawn of a run: its name, how a value is said, and how its axis is labelled. */
export const METRICS = {
  loss: { name: 'Loss', say: loss, unit: 'loss per supervised token' },
  learning_rate: { name: 'Learning rate', say: number, unit: 'learning rate' },
  tokens_per_second: { name: 'Speed', say: number, unit: 'tokens per second' },
  memory_bytes: { name: 'Memory', say: size, unit: 'memory' },
  grad_norm: { name: 'Gradient', say: number, unit: 'gradient norm' },
};
/** @typedef {keyof typeof METRICS} Metric */

const MAX_ROWS = 30;
const LARGEST = 1e100;
const LOG_RATIO = 20;
const FEW = 2;

const canDraw = (value) => isFinite_(value) && Math.abs(value) < LARGEST;

/** The value at which a curve is cut, so that a single spike does not flatten the rest; null if none is that high.
 * @param {number[][]} curves */
function ceiling(curves) {
  const shown = curves.filter((own) => own.length);
  const values = shown.flat().sort((a, b) => a - b);
  if (!values.length) return null;
  const high = values[Math.min(values.length - 1, Math.floor(0.98 * values.length))];
  const limit = 1.5 * Math.max(high, ...shown.map((own) => own[0]));
  return limit > 0 && limit < values[values.length - 1] ? limit : null;
}

/** The mean of each value and its neighbours; a value that cannot be drawn stays a gap.
 * @param {(number | null)[]} values */
function smoothed(values) {
  const half = Math.min(Math.floor(values.length / 20), 500) >> 1;
  if (!half) return null;
  return values.map((own, index) => {
    if (own === null) return null;
    const reach = Math.max(Math.min(index, values.length - 1 - index, half), half >> 2);
    let sum = 0;
    let known = 0;
    for (let at = Math.max(0, index - reach); at <= Math.min(values.length - 1, index + reach); at++) {
      const near = values[at];
      if (near !== null) {
        sum += near;
        known += 1;
      }
    }
    return sum / known;
  });
}

/** The points of a metric as uPlot reads them: steps, values, means, held-out. A value that is not finite is a gap.
 * @param {Curve} curve @param {Metric} metric */
function points(curve, metric) {
  const train = curve.columns[metric] ?? [];
  const steps = /** @type {number[]} */ (curve.columns.step ?? []);
  const held = metric === 'loss' ? curve.held_out : [];
  const values = train.map((own) => (canDraw(own) ? /** @type {number} */ (own) : null));
  const means = smoothed(values);
  const evaluations = new Map(held.map((own) => [own.step, canDraw(own.loss) ? Number(own.loss) : null]));
  const known = values.filter((own) => own !== null);
  const tested = [...evaluations.values()].filter((own) => own !== null);
  const limit = ceiling([known, tested]);
  const all = [...known, ...tested];
  const positive = all.filter((own) => own > 0);
  const isLog = metric === 'loss' && Math.max(...all) / LOG_RATIO >= Math.min(...positive);
  const floor = isLog ? Math.min(...positive) : -Infinity;
  const cut = (own) =>
    own === null || own === undefined ? own : Math.max(floor, Math.min(own, limit ?? Infinity));
  const at = new Map(steps.map((step, index) => [step, index]));
  const x = [...new Set([...steps, ...evaluations.keys()])].sort((a, b) => a - b);
  const pick = (own) =>
    x.map((step) => (at.has(step) ? cut(own[/** @type {number} */ (at.get(step))]) : undefined));
  const bad = [
    ...steps.filter((_, index) => train[index] !== null && !canDraw(train[index])),
    ...held.filter((own) => !canDraw(own.loss)).map((own) => own.step),
  ];
  const data = [x, pick(values), pick(means ?? values), x.map((step) => cut(evaluations.get(step)))];
  return { data, bad, isLog, limit, isEmpty: !all.length, hasMeans: means !== null, numHeld: tested.length };
}

/** A range that starts at 0 where that costs little, so that heights can be compared by eye.
 * @param {number | null} low @param {number | null} high @returns {[number, number]} */
function range(low, high) {
  if (low === null || high === null) return [0, 1];
  const padding = (high - low) * 0.06 || Math.abs(high) * 0.5 || 1;
  return [low >= 0 && low < 0.4 * high ? 0 : low - padding, high + padding];
}

/** Of the splits of a logarithmic axis, the powers of ten. @param {unknown} _ @param {number[]} splits */
const powers = (_, splits) => splits.map((own) => (Number.isInteger(Math.log10(own)) ? own : null));

/** Draw what the lines cannot show: steps that are not finite, health events, and the best evaluation.
 * @param {uPlot} plot @param {Curve} curve @param {Metric} metric @param {number[]} bad @param {(name: string) => string} colour */
function drawMarks(plot, curve, metric, bad, colour) {
  const { ctx, bbox } = plot;
  const scale = devicePixelRatio;
  const bottom = bbox.top + bbox.height;
  const across = (step) => Math.round(plot.valToPos(step, 'x', true));
  ctx.save();
  ctx.lineWidth = 1.5 * scale;
  for (const event of curve.healing) {
    ctx.strokeStyle = ctx.fillStyle = colour(event.severity === 'fault' ? '--fail' : '--weak');
    const x = across(event.step);
    ctx.setLineDash([3 * scale, 3 * scale]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bottom);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(x - 5 * scale, bbox.top);
    ctx.lineTo(x + 5 * scale, bbox.top);
    ctx.lineTo(x, bbox.top + 8 * scale);
    ctx.fill();
  }
  ctx.setLineDash([]);
  ctx.strokeStyle = colour('--fail');
  ctx.lineWidth = 2 * scale;
  for (const step of bad) {
    const x = across(step);
    ctx.beginPath();
    for (const side of [-1, 1]) {
      ctx.moveTo(x - 4 * scale * side, bottom - 12 * scale);
      ctx.lineTo(x + 4 * scale * side, bottom - 4 * scale);
    }
    ctx.stroke();
  }
  const best = metric === 'loss' ? curve.held_out.findLast((own) => own.is_best) : undefined;
  if (best && canDraw(best.loss)) {
    ctx.strokeStyle = colour('--evaluation');
    ctx.beginPath();
    ctx.arc(across(best.step), plot.valToPos(Number(best.loss), 'y', true), 8 * scale, 0, 7);
    ctx.stroke();
  }
  ctx.restore();
}

/** What a curve shows, in words. @param {Curve} curve @param {Metric} metric */
export function describe(curve, metric) {
  const { say, name } = METRICS[metric];
  const parts = [];
  const steps = curve.columns.step ?? [];
  const known = steps
    .map((step, index) => [Number(step), curve.columns[metric]?.[index]])
    .filter(([, value]) => canDraw(value));
  const [first, last] = [known[0], known[known.length - 1]];
  if (first) parts.push(`${name} ${say(first[1])} at step ${first[0]}, ${say(last[1])} at step ${last[0]}.`);
  const tested = metric === 'loss' ? curve.held_out : [];
  if (tested.length) {
    const end = tested[tested.length - 1];
    parts.push(`Held-out loss ${loss(tested[0].loss)} at step ${tested[0].step}, ${loss(end.loss)} at step ${end.step}.`);
  }
  return parts.join(' ') || 'No value yet.';
}

/** @param {{ curve: Curve, metric: Metric }} own */
export function Chart({ curve, metric }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const drawn = useRef(/** @type {{ plot?: uPlot, curve: Curve, bad: number[] }} */ ({ curve, bad: [] }));
  const [dark, setDark] = useState(0);
  const [under, setUnder] = useState('');
  const { data, bad, isLog, limit, isEmpty, hasMeans, numHeld } = points(curve, metric);

  useEffect(() => {
    const scheme = matchMedia('(prefers-color-scheme: dark)');
    const change = () => setDark((own) => own + 1);
    scheme.addEventListener('change', change);
    return () => scheme.removeEventListener('change', change);
  }, []);

  useEffect(() => {
    const holder = box.current;
    if (!holder || isEmpty) return;
    const style = getComputedStyle(document.body);
    const colour = (name) => style.getPropertyValue(name).trim();
    const { say } = METRICS[metric];
    const shown = isLog ? powers : (_, splits) => splits;
    const dimensions = () => ({ width: holder.clientWidth, height: holder.clientWidth < 500 ? 230 : 320 });
    const axis = { stroke: colour('--soft'), font: `12px ${style.fontFamily}`, ticks: { stroke: colour('--grid'), size: 6 } };
    const live = drawn.current;
    const options = {
      ...dimensions(),
      padding: [12, 12, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 7 }, drag: { x: false, y: false } },
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: (_, low, high) => range(low, high) } },
      axes: [
        { ...axis, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] },
        {
          ...axis,
          grid: { stroke: colour('--grid'), width: 1, filter: shown },
          ticks: { stroke: colour('--grid'), size: 6, filter: shown },
          filter: shown,
          size: metric === 'memory_bytes' ? 72 : 60,
          values: (_, /** @type {(number | null)[]} */ ticks) =>
            ticks.map((tick) => (tick === null ? '' : metric === 'memory_bytes' ? size(tick) : number(tick, 3))),
        },
      ],
      series: [
        {},
        { stroke: colour(hasMeans ? '--raw' : '--smooth'), width: hasMeans ? 1 : 2, points: { show: data[0].length < 3 } },
        { stroke: colour('--smooth'), width: 2.2, points: { show: false }, show: hasMeans },
        {
          stroke: colour('--evaluation'),
          width: 1.4,
          dash: [4, 4],
          paths: numHeld > FEW ? undefined : () => null,
          points: { show: true, size: 7, fill: colour('--evaluation') },
        },
      ],
      hooks: {
        draw: [(plot) => drawMarks(plot, live.curve, metric, live.bad, colour)],
        setCursor: [
          (plot) => {
            const index = plot.cursor.idx;
            const step = index === null || index === undefined ? undefined : plot.data[0][index];
            setUnder(step === undefined ? '' : readout(live.curve, metric, step, say));
          },
        ],
      },
    };
    live.curve = curve;
    live.bad = bad;
    const plot = new uPlot(/** @type {any} */ (options), /** @type {any} */ (data), holder);
    live.plot = plot;
    const observer = new ResizeObserver(() => plot.setSize(dimensions()));
    observer.observe(holder);
    return () => {
      observer.disconnect();
      plot.destroy();
      live.plot = undefined;
    };
  }, [metric, isLog, isEmpty, hasMeans, numHeld > FEW, dark]);

  useEffect(() => {
    drawn.current.curve = curve;
    drawn.current.bad = bad;
    drawn.current.plot?.setData(/** @type {any} */ (data));
  }, [curve]);

  const remarks = [];
  if (bad.length) {
    const shown = bad.slice(0, 5).map((step) => count(step)).join(', ');
    const steps = bad.length === 1 ? `step ${shown}` : `${count(bad.length, 'step')} (${shown}${bad.length > 5 ? ', …' : ''})`;
    remarks.push(`Not a finite number at ${steps}: a gap in the line, marked × below it.`);
  }
  if (limit !== null) remarks.push(`The curve is cut at ${number(limit, 3)}, so that one peak does not flatten the rest.`);
  return html`<figure class="plot">
    <p class="axis">
      ${METRICS[metric].unit}${isLog && ', logarithmic scale'}
      <span class="readout">${under}</span>
    </p>
    ${isEmpty && html`<p class="none empty-plot">${bad.length ? 'No value was a finite number: there is nothing to draw.' : 'The first step has not ended yet.'}</p>`}
    <div ref=${box} class="canvas" role="img" aria-label=${describe(curve, metric)}></div>
    ${!isEmpty && html`<${Legend} curve=${curve} metric=${metric} hasMeans=${hasMeans} bad=${bad.length} />`}
    ${remarks.map((text) => html`<p class="fine">${text}</p>`)}
    <${Table} curve=${curve} metric=${metric} />
  </figure>`;
}

/** What is under the pointer. @param {Curve} curve @param {Metric} metric @param {number} step @param {(value: any) => string} say */
function readout(curve, metric, step, say) {
  const index = (curve.columns.step ?? []).indexOf(step);
  const tested = metric === 'loss' ? curve.held_out.find((own) => own.step === step) : undefined;
  const value = index < 0 ? '' : ` ${say(curve.columns[metric]?.[index])}`;
  return `step ${count(step)}:${value}${tested ? `${value && ','} held-out ${loss(tested.loss)}` : ''}`;
}

/** @param {{ curve: Curve, metric: Metric, hasMeans: boolean, bad: number }} own */
function Legend({ curve, metric, hasMeans, bad }) {
  const key = (name) => html`<span class=${`swatch ${name}`} aria-hidden="true"></span>`;
  const best = metric === 'loss' ? curve.held_out.findLast((own) => own.is_best) : undefined;
  const hasHealing = curve.healing.length > 0;
  return html`<ul class="legend">
    <li>${key(hasMeans ? 'raw' : 'smooth')}${curve.is_reduced ? 'training, some of the steps' : 'training, each step'}</li>
    ${hasMeans && html`<li>${key('smooth')}training, smoothed</li>`}
    ${metric === 'loss' && curve.held_out.length > 0 && html`<li>${key('dot')}held-out rows</li>`}
    ${best && html`<li>${key('ring')}best, ${loss(best.loss)} at step ${count(best.step)}</li>`}
    ${hasHealing && html`<li>${key('event')}health event</li>`}
    ${bad > 0 && html`<li>${key('bad')}not finite</li>`}
  </ul>`;
}

/** The curve as a table: some steps, and each one that is not finite. @param {{ curve: Curve, metric: Metric }} own */
function Table({ curve, metric }) {
  const [isOpen, setOpen] = useState(false);
  const steps = curve.columns.step ?? [];
  const { say, name } = METRICS[metric];
  const stride = Math.ceil(steps.length / MAX_ROWS);
  const values = curve.columns[metric] ?? [];
  const picked = isOpen
    ? steps.map((_, index) => index).filter((index) => index % stride === 0 || index === steps.length - 1 || notFinite(values[index]))
    : [];
  const rows = picked.map((index) => [
    count(Number(steps[index])),
    say(values[index]),
    duration(curve.columns.seconds?.[index]),
  ]);
  const tested = curve.held_out.map((own) => [count(own.step), loss(own.loss)]);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>The curve in numbers</summary>
    <${Numbers} caption=${stride > 1 ? `Every ${count(stride)}th step that is drawn` : 'Each step'} head=${['Step', name, 'Took']} rows=${rows} left=${0} />
    ${metric === 'loss' && tested.length > 0 && html`<${Numbers} caption="Held-out rows" head=${['Step', 'Held-out loss']} rows=${tested} left=${0} />`}
  </details>`;
}
