{{/* Names */}}
{{- define "conserve.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "conserve.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "conserve.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "conserve.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "conserve.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "conserve.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "conserve.claim" -}}
{{- default (include "conserve.fullname" .) .Values.store.claim -}}
{{- end -}}

{{/* Labels of one component: (list context component) */}}
{{- define "conserve.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "conserve.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "conserve.labels" -}}
{{- $root := index . 0 -}}
{{ include "conserve.selector" . }}
app.kubernetes.io/part-of: conserve
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{/* An image: (list context override), the override being empty or of the same shape */}}
{{- define "conserve.image" -}}
{{- $root := index . 0 -}}
{{- $own := default dict (index . 1) -}}
{{- $repository := default $root.Values.image.repository $own.repository -}}
{{- if not $repository -}}
{{- fail "no image is published: build one (docs/how-to/kubernetes.md) and set image.repository" -}}
{{- end -}}
{{- printf "%s:%s" $repository (default (default $root.Chart.AppVersion $root.Values.image.tag) $own.tag) -}}
{{- end -}}

{{/* Not empty if all pods run on one node; then they have the server's nodes and tolerations too. */}}
{{- define "conserve.pinned" -}}
{{- $ours := not (or .Values.store.claim .Values.store.data) -}}
{{- if or (not .Values.store.database.secret) (and $ours (ne .Values.store.accessMode "ReadWriteMany")) -}}
true
{{- end -}}
{{- end -}}

{{/* What every pod has: (list context component [token]). Volumes and containers follow. */}}
{{- define "conserve.pod" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
serviceAccountName: {{ include "conserve.serviceAccount" $root }}
automountServiceAccountToken: {{ and (gt (len .) 2) (last .) }}
enableServiceLinks: false  # a Service called vllm would set VLLM_PORT to a URL, at which vLLM ends
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $pinned := include "conserve.pinned" $root }}
{{- with $root.Values.server }}
{{- if or (eq $part "server") (and .enabled $pinned) }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}
{{- if $pinned }}
affinity:  # SQLite locks within one node, and such a volume is mounted by one
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            app.kubernetes.io/name: {{ include "conserve.name" $root }}
            app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- end }}
{{- end -}}

{{- define "conserve.container" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- with .Values.environmentSecret }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end -}}

{{/* Variables of the store */}}
{{- define "conserve.environment" -}}
{{- with .Values.store.database }}
{{- if .secret }}
- name: CONSERVE_STORE
  valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- with .Values.store.data }}
- name: CONSERVE_DATA
  value: {{ . | quote }}
{{- end }}
{{- range $name, $value := .Values.environment }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "conserve.mounts" -}}
- {name: store, mountPath: /var/lib/conserve}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "conserve.volumes" -}}
- name: store
  {{- if and .Values.store.data (not .Values.store.claim) }}
  emptyDir: {}
  {{- else }}
  persistentVolumeClaim: {claimName: {{ include "conserve.claim" . }}}
  {{- end }}
- name: tmp
  emptyDir: {}
{{- end -}}

{{/* How pods of a component are replaced: SQLite and a GPU are never shared by an old and a new one. */}}
{{- define "conserve.strategy" -}}
{{- if .Values.store.database.secret -}}
{type: RollingUpdate, rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}
{{- else -}}
{type: Recreate}
{{- end -}}
{{- end -}}

{{- define "conserve.metadata" -}}
{{- $root := index . 0 -}}
labels:
  {{- include "conserve.labels" . | nindent 2 }}
  {{- with $root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $root.Values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Sentences for values that do not go together */}}
{{- define "conserve.check" -}}
{{- $values := .Values -}}
{{- if and $values.store.data (not $values.store.claim) (not $values.store.database.secret) -}}
{{- fail "with store.data no volume is made, and SQLite needs one: set store.database.secret or store.claim" -}}
{{- end -}}
{{- if not (or $values.harvester.enabled $values.server.enabled $values.api.enabled) -}}
{{- fail "nothing to install: enable harvester, server or api" -}}
{{- end -}}
{{- $ours := not (or $values.store.claim $values.store.data) -}}
{{- $parts := 0 -}}
{{- range list "harvester" "server" "api" -}}
{{- $part := index $values . -}}
{{- if $part.enabled -}}
{{- $parts = add1 $parts -}}
{{- end -}}
{{- $scaled := kindIs "invalid" $part.replicas -}}{{/* by an autoscaler */}}
{{- if and $part.enabled (or $scaled (gt (int $part.replicas) 1)) -}}
{{- if not $values.store.database.secret -}}
{{- fail (printf "%s.replicas above 1 share one queue only in PostgreSQL: set store.database.secret" .) -}}
{{- end -}}
{{- if and (not $values.store.claim) (not $values.store.data) (ne $values.store.accessMode "ReadWriteMany") -}}
{{- fail (printf "%s.replicas above 1 need a volume that nodes share: set store.accessMode to ReadWriteMany, or store.data" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $ours (gt (int $parts) 1) (eq $values.store.accessMode "ReadWriteOncePod") -}}
{{- fail "one pod alone can mount a ReadWriteOncePod volume: enable one part, or set store.accessMode to ReadWriteOnce" -}}
{{- end -}}
{{- if and $values.harvester.enabled (not $values.harvester.endpoints) (not $values.harvester.discover) -}}
{{- fail "harvester.endpoints is empty: name the servers, e.g. --set 'harvester.endpoints={http://vllm.NAMESPACE:8000}'" -}}
{{- end -}}
{{- if and $values.server.enabled (not $values.server.model) -}}
{{- fail "server.model is empty: set a hub id or a folder" -}}
{{- end -}}
{{- $keyless := and $values.server.enabled (not $values.server.keySecret.name) -}}{{/* harvesters ask for no key */}}
{{- $asks := and $values.metrics.serviceMonitor (or $values.api.enabled $keyless) -}}
{{- if and $asks (not $values.metrics.open) (not $values.metrics.keySecret.name) -}}
{{- fail "Prometheus needs a key for /metrics: set metrics.keySecret.name, or metrics.open" -}}
{{- end -}}
{{- end -}}
