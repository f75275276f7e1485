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

const STEP_TICKS = [1, 10, 100, 1e3, 1e4, 1e5].flatMap((ten) => [ten, 2 * ten, 5 * ten]);
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

/** The mean of each value and its neighbours; a value that cannot be drawn stays a gap. Null for a short curve.
 * @param {(number | null)[]} values */
function smoothed(values) {
  const half = Math.min(Math.floor(values.length / 20), 500) >> 1;
  if (!half) return null;
  const sums = [0];
  const known = [0];
  for (const own of values) {
    sums.push(sums[sums.length - 1] + (own ?? 0));
    known.push(known[known.length - 1] + Number(own !== null));
  }
  return values.map((own, at) => {
    const reach = Math.max(Math.min(at, values.length - 1 - at, half), half >> 2);
    const [low, high] = [Math.max(0, at - reach), Math.min(values.length, at + reach + 1)];
    return own === null ? null : (sums[high] - sums[low]) / (known[high] - known[low]);
  });
}

/** The points of a metric as uPlot reads them: steps, values, means, held-out. A value that is not finite is a gap.
 * @param {Curve} curve @param {Metric} metric */
function drawable(curve, metric) {
  const train = curve.columns[metric] ?? [];
  const steps = /** @type {number[]} */ (curve.columns.step ?? []);
  const held = metric === 'loss' ? curve.held_out : [];
  const values = train.map((own) => (canDraw(own) ? /** @type {number} */ (own) : null));
  const means = smoothed(values);
  const tests = new Map(held.map((own) => [own.step, canDraw(own.loss) ? Number(own.loss) : null]));
  const known = values.filter((own) => own !== null);
  const tested = [...tests.values()].filter((own) => own !== null);
  const limit = ceiling([known, tested]);
  const all = [...known, ...tested];
  const highest = all.reduce((most, own) => Math.max(most, own), 0);
  const lowest = all.reduce((least, own) => (own > 0 ? Math.min(least, own) : least), Infinity);
  const isLog = metric === 'loss' && highest / LOG_RATIO >= lowest;
  const floor = isLog ? lowest : -Infinity;
  const within = (own) => Math.max(floor, Math.min(own, limit ?? own));
  const cut = (own) => (typeof own === 'number' ? within(own) : own);
  const at = new Map(steps.map((step, index) => [step, index]));
  const x = [...new Set([...steps, ...tests.keys()])].sort((a, b) => a - b);
  const pick = (own) => x.map((step) => cut(own[at.get(step) ?? -1]));
  const badSteps = steps.filter((_, index) => train[index] !== null && !canDraw(train[index]));
  const bad = [...badSteps, ...held.filter((own) => !canDraw(own.loss)).map((own) => own.step)];
  const data = [x, pick(values), pick(means ?? values), x.map((step) => cut(tests.get(step)))];
  const [isEmpty, hasMeans, numHeld] = [!all.length, means !== null, tested.length];
  return { data, bad, isLog, limit, isEmpty, hasMeans, numHeld };
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
  const unit = devicePixelRatio;
  const [top, bottom] = [bbox.top, bbox.top + bbox.height];
  const across = (step) => Math.round(plot.valToPos(step, 'x', true));
  ctx.save();
  ctx.lineWidth = 2 * unit;
  ctx.strokeStyle = colour('--fail');
  for (const x of bad.map(across)) {
    const [arm, from] = [8 * unit, bottom - 12 * unit];
    ctx.stroke(new Path2D(`M${x - arm / 2} ${from}l${arm} ${arm}m0 ${-arm}l${-arm} ${arm}`));
  }
  const best = bestOf(curve, metric);
  if (best && canDraw(best.loss)) {
    ctx.strokeStyle = colour('--evaluation');
    ctx.beginPath();
    ctx.arc(across(best.step), plot.valToPos(Number(best.loss), 'y', true), 8 * unit, 0, 7);
    ctx.stroke();
  }
  ctx.setLineDash([3 * unit, 3 * unit]);
  for (const event of curve.healing) {
    const [x, side] = [across(event.step), 5 * unit];
    ctx.strokeStyle = ctx.fillStyle = colour(event.severity === 'fault' ? '--fail' : '--weak');
    ctx.stroke(new Path2D(`M${x} ${top}V${bottom}`));
    ctx.fill(new Path2D(`M${x - side} ${top}h${2 * side}l${-side} ${1.6 * side}z`));
  }
  ctx.restore();
}

/** The evaluation that is marked as the best. @param {Curve} curve @param {Metric} metric */
const bestOf = (curve, metric) =>
  metric === 'loss' ? curve.held_out.findLast((own) => own.is_best) : undefined;

/** What a curve shows, in words. @param {Curve} curve @param {Metric} metric */
function describe(curve, metric) {
  const { say, name } = METRICS[metric];
  const values = curve.columns[metric] ?? [];
  const points = curve.columns.step.map((step, index) => ({ step, value: values[index] }));
  const held = metric === 'loss' ? curve.held_out : [];
  const tests = held.map((own) => ({ step: own.step, value: own.loss }));
  const ends = (title, all) => {
    const known = all.filter((own) => canDraw(own.value));
    const at = ({ step, value }) => `${say(value)} at step ${step}`;
    return known.length ? `${title} ${at(known[0])}, ${at(known[known.length - 1])}. ` : '';
  };
  return ends(name, points) + ends('Held-out loss', tests) || 'No value yet.';
}

/** @param {{ curve: Curve, metric: Metric }} own */
export function Chart({ curve, metric }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const [dark, setDark] = useState(0);
  const [under, setUnder] = useState('');
  const { data, bad, isLog, limit, isEmpty, hasMeans, numHeld } = drawable(curve, metric);
  const drawn = useRef(/** @type {any} */ ({ curve, bad }));

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
    const height = holder.clientWidth < 500 ? 230 : 320;
    const dimensions = () => ({ width: holder.clientWidth, height });
    const ticks = { stroke: colour('--grid'), size: 6 };
    const axis = { stroke: colour('--soft'), font: `12px ${style.fontFamily}`, ticks };
    const isMemory = metric === 'memory_bytes';
    const label = (tick) => (tick === null ? '' : isMemory ? size(tick) : number(tick, 3));
    const points = { show: false };
    const line = (name, width, more = {}) => ({ stroke: colour(name), width, points, ...more });
    const few = { points: { show: data[0].length < 3 } };
    const y = isLog ? { distr: 3 } : { range: (_, low, high) => range(low, high) };
    const dots = { show: true, size: 7, fill: colour('--evaluation') };
    const tested = { dash: [4, 4], paths: numHeld > FEW ? undefined : () => null, points: dots };
    const live = drawn.current;
    const point = (plot) => {
      const step = plot.data[0][plot.cursor.idx ?? -1];
      setUnder(step === undefined ? '' : readout(live.curve, metric, step, say));
    };
    const options = {
      ...dimensions(),
      padding: [12, 12, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 7 }, drag: { x: false, y: false } },
      scales: { x: { time: false }, y },
      axes: [
        { ...axis, grid: { show: false }, incrs: STEP_TICKS },
        {
          ...axis,
          grid: { ...ticks, width: 1, filter: shown },
          ticks: { ...ticks, filter: shown },
          filter: shown,
          size: isMemory ? 72 : 60,
          values: (_, splits) => splits.map(label),
        },
      ],
      series: [
        {},
        hasMeans ? line('--raw', 1) : line('--smooth', 2, few),
        line('--smooth', 2.2, { show: hasMeans }),
        line('--evaluation', 1.4, tested),
      ],
      hooks: {
        draw: [(plot) => drawMarks(plot, live.curve, metric, live.bad, colour)],
        setCursor: [point],
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

  const some = `${bad.slice(0, 5).join(', ')}${bad.length > 5 ? ', …' : ''}`;
  const steps = bad.length === 1 ? `step ${some}` : `${count(bad.length, 'step')} (${some})`;
  return html`<figure class="plot">
    <p class="axis">
      ${METRICS[metric].unit}${isLog && ', logarithmic scale'}
      <span class="readout">${under}</span>
    </p>
    ${isEmpty && html`<p class="none empty-plot">${bad.length ? 'No value was a finite number: there is nothing to draw.' : 'The first step has not ended yet.'}</p>`}
    <div ref=${box} class="canvas" role="img" aria-label=${describe(curve, metric)}></div>
    ${!isEmpty && html`<${Legend} curve=${curve} metric=${metric} hasMeans=${hasMeans} bad=${bad.length} />`}
    ${bad.length > 0 && html`<p class="fine">Not a finite number at ${steps}: a gap in the line, marked × below it.</p>`}
    ${limit !== null && html`<p class="fine">The curve is cut at ${number(limit, 3)}, so that one peak does not flatten the rest.</p>`}
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
  const best = bestOf(curve, metric);
  return html`<ul class="legend">
    <li>${key(hasMeans ? 'raw' : 'smooth')}${curve.is_reduced ? 'training, some of the steps' : 'training, each step'}</li>
    ${hasMeans && html`<li>${key('smooth')}training, smoothed</li>`}
    ${metric === 'loss' && curve.held_out.length > 0 && html`<li>${key('dot')}held-out rows</li>`}
    ${best && html`<li>${key('ring')}best, ${loss(best.loss)} at step ${count(best.step)}</li>`}
    ${curve.healing.length > 0 && html`<li>${key('event')}health event</li>`}
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
  const took = curve.columns.seconds ?? [];
  const row = (step, at) => [count(step), say(values[at]), duration(took[at])];
  const isPicked = (_, at) => at % stride === 0 || at === steps.length - 1 || notFinite(values[at]);
  const rows = isOpen ? steps.map(row).filter(isPicked) : [];
  const tested = curve.held_out.map((own) => [count(own.step), loss(own.loss)]);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>The curve in numbers</summary>
    <${Numbers} caption=${stride > 1 ? `Every ${count(stride)}th step that is drawn` : 'Each step'} head=${['Step', name, 'Took']} rows=${rows} left=${0} />
    ${metric === 'loss' && tested.length > 0 && html`<${Numbers} caption="Held-out rows" head=${['Step', 'Held-out loss']} rows=${tested} left=${0} />`}
  </details>`;
}
