// What the page uses of each library; everything else is left out of the vendored file.
export { h, render, Fragment } from 'preact';
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from 'preact/hooks';
export { signal, computed, effect, batch, untracked, useSignal, useComputed } from '@preact/signals';
export { html } from 'htm/preact';
export { default as uPlot } from 'uplot';
