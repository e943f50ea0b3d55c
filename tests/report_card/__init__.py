"""The report card: what tests show at this commit, in parts that are run one by one (`make report-card`)."""
