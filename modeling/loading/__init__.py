"""Reading checkpoints: find the files, judge them by their headers, then read leaf by leaf.

Nothing is read, and nothing allocated, before every fault that headers can tell has been reported in one message.
"""
