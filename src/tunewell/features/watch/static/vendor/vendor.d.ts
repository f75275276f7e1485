// Types of the vendored file, for `tsc`; the page does not load it.
export { h, render, Fragment } from 'preact';
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from 'preact/hooks';
export { signal, computed, effect, batch, untracked, useSignal, useComputed } from '@preact/signals';
export { html } from 'htm/preact';
export { default as uPlot } from 'uplot';
