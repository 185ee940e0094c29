def write_report(d, s):
    return d
