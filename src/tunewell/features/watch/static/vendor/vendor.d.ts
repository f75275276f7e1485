// Types of the vendored file, for `tsc`; the page does not load it.
export { h, render, Fragment } from 'preact';
export { useEffect, useErrorBoundary, useRef, useState } from 'preact/hooks';
export { signal, computed } from '@preact/signals';
export { html } from 'htm/preact';
export { default as uPlot } from 'uplot';
