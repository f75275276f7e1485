// What the page uses of each library; everything else is left out of the vendored file.
export { h, render, Fragment } from 'preact';
export { useEffect, useErrorBoundary, useRef, useState } from 'preact/hooks';
export { signal, computed } from '@preact/signals';
export { html } from 'htm/preact';
export { default as uPlot } from 'uplot';
