"""The checks of `tunewell doctor`, one module for each group. Each check reads facts and yields findings."""
