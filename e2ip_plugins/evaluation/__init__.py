"""``e2ip evaluate``: predictions for files of any length, which an interrupted run resumes."""
